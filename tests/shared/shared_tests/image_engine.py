"""Test group *images*: engines with processes of their own that read images, beside transformers' passes.

Tests cover logprobs, tokens that are never sampled, and weight updates with and without the image encoder.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from roll_core.data.media import image_media
from roll_core.data.processor import processor_of
from roll_core.errors import DataError, MissingTensorError
from roll_core.spec.model import ModelSpec
from roll_core.spec.rollout import IMAGE
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, SamplingParams, TrainSequence
from roll_testing.errors import raises_error
from roll_testing.image_models import IDS, IMAGE_END, IMAGE_START, VIDEO_TYPES, tiny_vision
from roll_testing.infer.interrupting import until_interrupted, was_whole
from shared_tests.loaded_engine import CLOSE, digests
from shared_tests.tiny_vision import picture, tiny_video, transformers_logprobs, vision_sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch import Tensor

    from roll_core.types import Completion, Media, TokenIds

SIZES = (56, 84), (28, 28), (90, 40)


def ask(name: str, prompt: tuple[TokenIds, tuple[Media, ...]], n: int = 1, **given: Any) -> GenerateRequest:
    ids, media = prompt
    params = SamplingParams(**{"max_new_tokens": 10, "ignore_eos": True, "temperature": 1.0, "seed": 3, **given})
    return GenerateRequest(id=name, prompt_ids=ids, media=media, params=params, n=n)


class SeeingEngine:
    """A started engine, and the trainer's model."""

    def __init__(self, folder: Path, kind: str, start: Callable[[ModelSpec], Any]) -> None:
        """`start` starts the engine of a `ModelSpec`."""
        self.folder = tiny_vision(folder, kind, num_heads=2)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        processor = processor_of(AutoTokenizer.from_pretrained(folder))
        assert processor is not None
        self.processor = processor
        spec = ModelSpec(path=str(folder), tokenizer=str(folder), dtype="fp32")
        self.live = start(spec)

    def prompt(self, text: str, *seeds: int) -> tuple[TokenIds, tuple[Media, ...]]:
        """Ids of a text with an image at each `#`, and the images."""
        images = [picture(*SIZES[seed % len(SIZES)], seed=seed) for seed in seeds]
        sequence = vision_sequence(self.folder, text.replace("#", IMAGE), "", *images)
        return sequence.tokens, sequence.media

    def generate(self, *requests: GenerateRequest) -> list[Completion]:
        async def together() -> list[Completion]:
            return list(await asyncio.gather(*(self.live.strategy.generate(request) for request in requests)))

        completions: list[Completion] = self.live.run(together())
        return completions

    def check(self, *requests: GenerateRequest, atol: float = CLOSE) -> list[Completion]:
        """Completions whose logprobs are those of transformers' pass over each whole sequence."""
        completions = self.generate(*requests)
        for request, completion in zip(requests, completions, strict=True):
            for output in completion.outputs:
                tokens = np.concatenate([request.prompt_ids, output.token_ids])
                sequence = TrainSequence(id="", tokens=tokens, media=request.media, loss_mask=tokens > 0)
                heat = request.params.temperature or 1.0
                with torch.no_grad():
                    logprobs = transformers_logprobs(self.folder, [sequence], self.model, heat)
                np.testing.assert_allclose(output.logprobs, logprobs[len(request.prompt_ids) :], atol=atol)
        return completions

    def close(self) -> None:
        self.live.close()


class ImageEngineTests:
    """Tests use the engine of the author's fixture `engine`, a `SeeingEngine`."""

    def test_logprobs_are_those_of_transformers(self, engine: SeeingEngine) -> None:
        prompt = engine.prompt
        ids, media = prompt("What is # this?", 0)
        bare = ids[~np.isin(ids, [IDS[IMAGE_START], IDS[IMAGE_END]])]
        engine.check(
            ask("one", (ids, media)),
            ask("without its start and end", (bare, media)),
            ask("two", prompt("#a#", 1, 2), n=2),
            ask("other order", prompt("#a#", 2, 1)),
            ask("text", prompt("Only a text.")),
            ask("cold", prompt("What is # this?", 3), temperature=0.6, top_k=20),
        )

    def test_logprobs_after_videos_are_those_of_transformers(self, engine: SeeingEngine) -> None:
        if engine.model.config.model_type not in VIDEO_TYPES:
            pytest.skip("reads no videos")
        long = tiny_video(engine.folder, *(picture(70, 98, seed) for seed in range(6)))
        short = tiny_video(engine.folder, *(picture(56, 56, seed) for seed in range(2)), fps=0.7)
        image = image_media(picture(84, 56, 3))
        rows = [
            vision_sequence(engine.folder, text.replace("#", IMAGE), "", *media, id=name)
            for name, text, media in (
                ("one", "see#so", (long,)),
                ("same", "see#so", (long,)),
                ("mixed", "#a#b#c", (short, image, long)),
            )
        ]
        requests = [ask(row.id, (row.tokens, row.media), n=2) for row in rows]
        engine.check(*requests, ask("image", engine.prompt("What is # this?", 0)))
        (video,) = requests[0].media
        other = tiny_video(engine.folder, *(picture(70, 98, seed + 9) for seed in range(6)))
        engine.check(replace(requests[0], id="other", media=(other,)))
        with raises_error(DataError, "surplus", "video"):
            engine.generate(replace(requests[0], id="surplus", media=(video, video)))

    def test_interrupted_responses_continue(self, engine: SeeingEngine) -> None:
        prompt = engine.prompt("What is # this?", 1)
        request = ask("whole", prompt, temperature=0.0)
        (whole,) = engine.check(request)
        tokens = whole.outputs[0].token_ids
        resumed = replace(
            request,
            id="rest",
            prompt_ids=np.concatenate([request.prompt_ids, tokens[:4]]),
            params=replace(request.params, max_new_tokens=6),
        )
        (rest,) = engine.check(resumed)
        assert rest.outputs[0].token_ids.tolist() == tokens[4:].tolist()

    def test_running_requests_continue_over_an_update(self, engine: SeeingEngine) -> None:
        live, num = engine.live, 120
        weights = [*engine.model.named_parameters()]
        live.publish(weights)
        request = ask("whole", engine.prompt("What is # this?", 2), temperature=0.0, max_new_tokens=num)
        (whole,) = engine.check(request)

        async def update_meanwhile() -> Completion:
            running = asyncio.create_task(live.strategy.generate(replace(request, id="cut")))
            await live.strategy.generate(ask("short", engine.prompt("a"), max_new_tokens=6))
            await live.update(weights)
            completion: Completion = await running
            return completion

        cut = until_interrupted(lambda: live.run(update_meanwhile()), lambda out: was_whole(out, num, live.version - 1))
        output = cut.outputs[0]
        assert len(set(output.versions)) == 2
        assert output.token_ids.tolist() == whole.outputs[0].token_ids.tolist()
        np.testing.assert_allclose(output.logprobs, whole.outputs[0].logprobs, atol=CLOSE)

    def test_another_number_of_image_tokens_is_an_error(self, engine: SeeingEngine) -> None:
        ids, media = engine.prompt("What is # this?", 0)
        token = engine.processor.image_token_id
        places = np.flatnonzero(ids == token)
        for wrong in (np.delete(ids, places[0]), np.insert(ids, places[0], token), ids[ids != token]):
            with raises_error(DataError, "many", str(np.count_nonzero(wrong == token)), str(len(places))):
                engine.generate(ask("many", (wrong, media)))
        with raises_error(DataError, "none", "0 images"):
            engine.generate(ask("none", (ids, ())))

    def test_tokens_of_images_are_never_sampled(self, engine: SeeingEngine) -> None:
        model, media_tokens = engine.model, list(engine.processor.media_token_ids)
        prompt = engine.prompt("Say # it.", 0)
        rows = model.get_output_embeddings().weight
        before = rows.detach().clone()
        (greedy,) = engine.generate(ask("greedy", prompt, temperature=0.0))
        with torch.no_grad():  # the reserved tokens become the most likely ones
            rows[media_tokens] = 3 * rows[greedy.outputs[0].token_ids[0]]
        try:
            engine.live.publish([*model.named_parameters()])
            requests = [ask(f"t{heat}", prompt, temperature=heat) for heat in (0.0, 1.0)]
            for completion in engine.check(*requests):
                assert not set(completion.outputs[0].token_ids.tolist()) & set(media_tokens)
        finally:
            with torch.no_grad():
                rows.copy_(before)

    def test_frozen_encoders_are_sent_once(self, engine: SeeingEngine) -> None:
        request = ask("sent", engine.prompt("What is # this?", 0))
        engine.live.publish([*engine.model.named_parameters()])
        for _ in range(2):
            tensors = trained(engine.model)
            step([tensor for _, tensor in tensors], engine.live.version)
            whole = make_manifest(engine.live.version + 1, engine.model.named_parameters())
            sent = tuple(entry for entry in whole.tensors if entry.name in dict(tensors))
            manifest = replace(whole, tensors=sent, unsent=tuple(set(whole.tensors) - set(sent)))
            _, receipt = engine.live.publish(tensors, manifest=manifest)
            assert receipt.digests == digests(whole)
            engine.check(replace(request, id=f"version {engine.live.version}"))
        with raises_error(MissingTensorError):
            engine.live.publish(trained(engine.model))

    def test_encoders_are_published_and_their_caches_cleared(self, engine: SeeingEngine) -> None:
        request = ask("before", engine.prompt("What is # this?", 0), temperature=0.0)
        (before,) = engine.generate(request)
        step(engine.model.parameters(), 2)
        manifest, receipt = engine.live.publish([*engine.model.named_parameters()])
        assert receipt.digests == digests(manifest)
        (after,) = engine.check(replace(request, id="after"))
        assert np.abs(before.outputs[0].logprobs - after.outputs[0].logprobs).max() > CLOSE


def trained(model: Any) -> list[tuple[str, Tensor]]:
    """Parameters of the language model, which the trainer sends if the rest is frozen."""
    frozen = ("visual", "vision_tower", "multi_modal_projector")
    return [(name, each) for name, each in model.named_parameters() if not any(part in name for part in frozen)]


def step(parameters: Iterable[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
