"""Test group *images*: engines that read images and videos of prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from roll_core.errors import DataError
from roll_core.spec.providers import TrainProvider
from roll_testing.bounds import check_rows
from roll_testing.errors import raises_error
from roll_testing.images import ImageReference, random_image, write_image_model
from roll_testing.infer.engine import ask
from roll_testing.infer.kit import SEEN, InferKit
from roll_testing.infer.models import CLEAR, log_softmax, moved
from roll_testing.infer.trainer import check_against_trainer
from roll_testing.kit import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from roll_core.spec.model import ModelSpec
    from roll_core.types import Completion, Floats, GenerateRequest, Media, TokenIds
    from roll_testing.infer.engine import Engine, Setup

SIZES = ((56, 84), (28, 28), (84, 28))
"""Width and height of images: with the default model 6, 1 and 3 tokens."""


class ImageTests(InferKit):
    """Compares with transformers' pass over one whole sequence and its images."""

    def image_model(self, folder: Path) -> ModelSpec:
        """Write a small float32 model with images, its tokenizer and processor into `folder`, and return its spec.

        Default: a Qwen2.5-VL of transformers.
        """
        return write_image_model(folder)

    @pytest.fixture
    def seeing(
        self, setup: Setup, engine_of: Callable[[Setup], Engine], tmp_path_factory: pytest.TempPathFactory
    ) -> Seeing:
        """An engine of the model with images, and the reference. Skips the test without the capability `images`."""
        self.need(self.can.images, "images")
        known = self._once("images")
        if "spec" not in known:
            known["spec"] = self.image_model(tmp_path_factory.mktemp("images"))
        setup = setup.with_(model=replace(known["spec"], dtype=setup.model.dtype))
        if "reference" not in known:
            known["reference"] = ImageReference(setup.model)
            known["stored"] = known["reference"].weights()
        seeing = Seeing(setup, engine_of(setup), known["reference"])
        seeing.reference.take(known["stored"])
        if not seeing.engine.pristine:
            seeing.engine.publish(self.published(known["stored"], setup.model))
            seeing.engine.pristine = True
        return seeing

    def test_logprobs_after_images_equal_the_reference(self, seeing: Seeing) -> None:
        """In a batch of prompts with no, one and two images, logprobs must equal the reference's.

        So must the logprobs of the prompts, if the engine returns them.
        """
        requests = [
            replace(
                seeing.ask(*sizes, n=2, temperature=0.8, seed=self.seed(seeing.engine, i)),
                prompt_logprobs=self.can.prompt_logprobs,
            )
            for i, sizes in enumerate([(), (0,), (1, 2), (1,), (2, 0)])
        ]
        completions = seeing.engine.generate(*requests)
        self._check_seen(seeing, requests, completions)
        if self.can.prompt_logprobs:
            for request, completion in zip(requests, completions, strict=True):
                expected = seeing.logprobs(request, request.prompt_ids[1:], num_prompt=1)
                assert completion.prompt_logprobs is not None
                rows = {request.id: completion.prompt_logprobs[1:]}
                check_rows("prompt logprob", rows, {request.id: expected}, self.bound(seeing.setup))

    def test_greedy_tokens_after_images_are_the_most_likely(self, seeing: Seeing) -> None:
        """At `temperature == 0`, each token must be the most likely one that does not belong to images."""
        self.need_exact(seeing.setup)
        requests = [seeing.ask(*sizes, temperature=0.0) for sizes in [(0,), (), (1, 2)]]
        for request, completion in zip(requests, seeing.engine.generate(*requests), strict=True):
            seeing.check_greedy(request, completion.outputs[0].token_ids)

    def test_equal_prompts_with_other_images_differ(self, seeing: Seeing) -> None:
        """Caches must be keyed by the images: equal token ids may have other images."""
        first = seeing.ask(0, temperature=0.0, max_new_tokens=4)
        other = replace(first, id="other", media=(random_image(*SIZES[0], seed=9),))
        again = replace(first, id="again")
        difference = np.abs(
            seeing.logprobs(first, first.prompt_ids[-2:], num_prompt=len(first.prompt_ids) - 2)
            - seeing.logprobs(other, first.prompt_ids[-2:], num_prompt=len(first.prompt_ids) - 2)
        )
        assert difference.max() >= SEEN * self.bound(seeing.setup), "the images hardly change the logprobs"
        requests = [first, other, again]
        self._check_seen(seeing, requests, [seeing.engine.generate(request)[0] for request in requests])
        together = [replace(request, id=f"{request.id} together") for request in requests]
        self._check_seen(seeing, together, seeing.engine.generate(*together))

    def test_logprobs_after_videos_equal_the_reference(self, seeing: Seeing) -> None:
        """With the capability `videos`, logprobs after a video must equal the reference's.

        So must those of the same text with another video, and with a video beside an image.
        """
        self.need(self.can.videos, "videos")
        video, other = (seeing.reference.random_video(56, 28, 6, seed) for seed in range(2))
        image = random_image(*SIZES[0])
        requests = [
            seeing.ask_about(*media, temperature=0.8, seed=self.seed(seeing.engine, i))
            for i, media in enumerate([(video,), (), (other,), (image, video), (video,)])
        ]
        self._check_seen(seeing, requests, seeing.engine.generate(*requests))

    def test_sampled_tokens_continue_a_prompt_with_images(self, seeing: Seeing) -> None:
        """A prompt may end in sampled tokens, as after an interruption: logprobs must equal the reference's."""
        request = seeing.ask(2, 1, max_new_tokens=6, temperature=0.0)
        (begun,) = seeing.engine.generate(request)
        prompt = np.concatenate([request.prompt_ids, begun.outputs[0].token_ids])
        rest = replace(request, id="rest", prompt_ids=prompt)
        self._check_seen(seeing, [rest], seeing.engine.generate(rest))

    def test_published_weights_change_what_is_seen(self, seeing: Seeing) -> None:
        """After a publish of other weights, also of the image encoder, logprobs must equal the reference's."""
        request = seeing.ask(0, temperature=0.0)
        seeing.engine.generate(request)
        weights = moved(seeing.reference.weights(), 5)
        seeing.reference.take(weights)
        seeing.engine.publish(self.published(weights, seeing.setup.model))
        after = replace(request, id="after")
        self._check_seen(seeing, [after], seeing.engine.generate(after))

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_tokens_of_images_are_never_sampled(self, seeing: Seeing, temperature: float) -> None:
        """Tokens of images must not be sampled, even if they are the most likely ones.

        Logprobs are over the whole vocabulary, as without this mask.
        """
        requests = [
            seeing.ask(*sizes, n=4, temperature=temperature, seed=self.seed(seeing.engine, 3)) for sizes in [(0,), ()]
        ]
        weights = seeing.reference.weights()
        head = weights["lm_head.weight"]
        best = int(seeing.reference.logits(requests[0].prompt_ids, requests[0].media)[-1].argmax())
        for id in seeing.reference.processor.media_token_ids:
            head[id] = 1.5 * head[best]
        seeing.reference.take(weights)
        seeing.engine.publish(self.published(weights, seeing.setup.model))
        completions = seeing.engine.generate(*requests)
        self._check_seen(seeing, requests, completions)
        for completion in completions:
            for output in completion.outputs:
                sampled = np.isin(output.token_ids, seeing.reference.processor.media_token_ids)
                assert not sampled.any(), f"a token of images was sampled: {output.token_ids.tolist()}"

    def test_images_that_do_not_fit_the_prompt_are_refused(self, seeing: Seeing) -> None:
        """Image tokens without images, and images without their tokens, must raise `DataError`, naming the request."""
        good = seeing.ask(0, 1)
        for media in ((), good.media[:1], (*good.media, good.media[0])):
            with raises_error(DataError, good.id):
                seeing.engine.generate(replace(good, media=media))
        self._check_seen(seeing, [good], seeing.engine.generate(good))

    def test_logprobs_after_images_equal_the_train_strategys(self, seeing: Seeing) -> None:
        """Logprobs must equal those of `train_strategy`, if it reads images."""
        self.need_trainer(seeing.setup)
        provider: TrainProvider = registry().find(TrainProvider, self.train_strategy)
        self.need(provider.capabilities.images, f"images by {self.train_strategy}")
        requests = [
            seeing.ask(*sizes, temperature=0.8, seed=self.seed(seeing.engine, 7)) for sizes in [(0,), (), (2, 1)]
        ]
        check_against_trainer(self.train_strategy, seeing.setup, requests, seeing.engine.generate(*requests))

    def _check_seen(
        self, seeing: Seeing, requests: Sequence[GenerateRequest], completions: Sequence[Completion]
    ) -> None:
        """Fail unless each sampled token has the reference's logprob."""
        actual, expected = {}, {}
        for request, completion in zip(requests, completions, strict=True):
            for index, output in enumerate(completion.outputs):
                key = f"{request.id}, output {index}"
                actual[key], expected[key] = output.logprobs, seeing.logprobs(request, output.token_ids)
        check_rows("logprob", actual, expected, self.bound(seeing.setup))


class Seeing:
    """An engine of a model with images, beside the reference."""

    def __init__(self, setup: Setup, engine: Engine, reference: ImageReference) -> None:
        self.setup, self.engine, self.reference = setup, engine, reference

    def ask(self, *sizes: int, **params: Any) -> GenerateRequest:
        """Return a request with an image of each of these sizes (indices of `SIZES`) between text."""
        return self.ask_about(*(random_image(*SIZES[size], seed=size) for size in sizes), **params)

    def ask_about(self, *media: Media, **params: Any) -> GenerateRequest:
        """Return a request with these images and videos between text."""
        return replace(ask(self.reference.prompt(media), **params), media=media)

    def logprobs(self, request: GenerateRequest, response: TokenIds, *, num_prompt: int | None = None) -> Floats:
        """Return `[R]`, logprobs of a response to the prompt, or of its tokens after the first `num_prompt`."""
        temperature = (request.params.temperature or 1.0) if num_prompt is None else 1.0
        prompt = request.prompt_ids[:num_prompt]
        tokens = np.concatenate([prompt, response])
        rows = self.reference.logits(tokens, request.media)[len(prompt) - 1 : -1] / temperature
        return np.asarray(log_softmax(rows)[np.arange(len(response)), response], dtype=np.float32)

    def check_greedy(self, request: GenerateRequest, response: TokenIds) -> None:
        """Fail unless each token is the most likely one that does not belong to images, up to rounding."""
        tokens = np.concatenate([request.prompt_ids, response])
        rows = self.reference.logits(tokens, request.media)[len(request.prompt_ids) - 1 : -1].copy()
        rows[:, list(self.reference.processor.media_token_ids)] = -np.inf
        below = rows.max(-1) - rows[np.arange(len(response)), response]
        wrong = np.flatnonzero(below > CLEAR)
        assert not wrong.size, f"token {wrong[0]} of the response {response.tolist()} is not the most likely one"
