"""Prompts with images: the engine beside transformers' own `generate` and passes over whole sequences."""

import asyncio
from dataclasses import replace
from functools import wraps

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from roll_core.data.media import image_media
from roll_core.data.pack import pack
from roll_core.data.processor import processor_of
from roll_core.errors import DataError, UnsupportedError
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec, WantedOutputs
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, SamplingParams, TrainSequence
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.errors import raises_error
from roll_testing.image_models import IDS, IMAGE_TOKEN, MODEL_TYPES, tiny_vision
from shared_tests.tiny_vision import picture

SIZES = (56, 84), (28, 28), (90, 40)
"""Width and height of the images, which have different numbers of features in some models."""


class Reference:
    """A stored model, run by transformers one sequence at a time."""

    def __init__(self, folder):
        self.spec = ModelSpec(path=str(folder), dtype="fp32")
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = processor_of(self.tokenizer)
        self.images = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def prompt(self, text, *seeds, fill=None):
        """Ids of a text with an image at each `#`, and the images."""
        sizes = [SIZES[seed % len(SIZES)] for seed in seeds]
        pictures = [picture(*size, seed=seed) for size, seed in zip(sizes, seeds, strict=True)]
        if fill is not None:
            pictures = [each.point(lambda _: fill) for each in pictures]
        media = tuple(image_media(each) for each in pictures)
        first, *rest = text.split("#")
        parts = [part for piece in rest for part in ({"type": "image"}, {"type": "text", "text": piece})]
        messages = [{"role": "user", "content": [{"type": "text", "text": first}, *parts]}]
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expanded = self.processor.expand(rendered, media)
        return np.array(self.tokenizer.encode(expanded, add_special_tokens=False)), media

    def inputs(self, tokens, media):
        ids = torch.from_numpy(np.asarray(tokens))[None]
        types = (ids == IDS[IMAGE_TOKEN]).long()
        kind = self.model.config.model_type
        named = {"qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids", "gemma3": "token_type_ids"}
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if kind in named:
            inputs[named[kind]] = types
        if media:
            cropped = {"crop_to_patches": True} if kind == "internvl" else {}  # the default of its processor
            pixels = self.images([each.image() for each in media], return_tensors="pt", **cropped)
            inputs |= {name: pixels[name] for name in ("pixel_values", "image_grid_thw") if name in pixels}
        return inputs

    @torch.no_grad()
    def logits(self, tokens, media):
        """`[L, V]`, of one pass over the whole sequence."""
        return self.model(**self.inputs(tokens, media), use_cache=False).logits[0]

    def logprobs(self, prompt, media, response, temperature=1.0):
        tokens = np.concatenate([prompt, response])
        logprobs = torch.log_softmax(self.logits(tokens, media)[len(prompt) - 1 : -1] / temperature, dim=-1)
        return logprobs[np.arange(len(response)), response].numpy()

    @torch.no_grad()
    def generate(self, tokens, media, num):
        outputs = self.model.generate(
            **self.inputs(tokens, media),
            do_sample=False,
            max_new_tokens=num,
            min_new_tokens=num,
            eos_token_id=None,
            suppress_tokens=list(self.processor.media_token_ids),
        )
        return outputs[0, len(tokens) :].numpy()


@pytest.fixture(scope="module", params=MODEL_TYPES)
def reference(request, tmp_path_factory):
    return Reference(tiny_vision(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Reference(tiny_vision(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl"))


def ask(name, prompt, media=(), n=1, prompt_logprobs=False, **params):
    params = SamplingParams(**{"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.0, **params})
    return GenerateRequest(
        id=name, prompt_ids=prompt, media=tuple(media), params=params, n=n, prompt_logprobs=prompt_logprobs
    )


async def together(engine, *requests):
    return await asyncio.gather(*[engine.generate(request) for request in requests])


def mixed_prompts(reference):
    """No image, one, two; of equal and different lengths; the same ids with other images."""
    one, image = reference.prompt("What is this? # Say it.", 0)
    _, other = reference.prompt("What is this? # Say it.", 3)
    two, pair = reference.prompt("#a#", 1, 2)
    text, _ = reference.prompt("Only a text.")
    same_length = np.resize(text, len(one))
    return [(one, image), (one, other), (two, pair), (text, ()), (same_length, ()), (one[-9:], ())]


def test_greedy_tokens_and_logprobs_are_those_of_transformers(reference, with_engine):
    prompts = mixed_prompts(reference)

    async def act(engine):
        return await together(engine, *[ask(str(i), *prompt) for i, prompt in enumerate(prompts)])

    for (prompt, media), completion in zip(prompts, with_engine(act, spec=reference.spec), strict=True):
        (output,) = completion.outputs
        np.testing.assert_array_equal(output.token_ids, reference.generate(prompt, media, 12))
        np.testing.assert_allclose(output.logprobs, reference.logprobs(prompt, media, output.token_ids), atol=1e-4)


def test_sampled_and_prompt_logprobs_are_those_of_transformers(reference, with_engine):
    prompts = mixed_prompts(reference)

    async def act(engine):
        requests = [
            ask(str(i), *prompt, n=4, seed=i, temperature=0.7, prompt_logprobs=True) for i, prompt in enumerate(prompts)
        ]
        return await together(engine, *requests), engine.metrics()

    completions, metrics = with_engine(act, spec=reference.spec)
    for (prompt, media), completion in zip(prompts, completions, strict=True):
        assert len({output.token_ids.tobytes() for output in completion.outputs}) == 4
        for output in completion.outputs:
            expected = reference.logprobs(prompt, media, output.token_ids, temperature=0.7)
            np.testing.assert_allclose(output.logprobs, expected, atol=1e-4)
        expected = reference.logprobs(prompt[:1], media, prompt[1:])
        np.testing.assert_allclose(completion.prompt_logprobs[1:], expected, atol=1e-4)
    num_tokens = sum(len(prompt) for prompt, _ in prompts)
    assert metrics["prompt_tokens"] == num_tokens
    assert metrics["shared_prompt_tokens"] == 3 * num_tokens


def test_logprobs_of_sampled_tokens_are_those_of_hf_train(reference, with_engine):
    prompts = mixed_prompts(reference)

    async def act(engine):
        return await together(
            engine, *[ask(str(i), *prompt, n=2, seed=i, temperature=0.8) for i, prompt in enumerate(prompts)]
        )

    completions = with_engine(act, spec=reference.spec)
    sequences, mine = [], []
    for (prompt, media), completion in zip(prompts, completions, strict=True):
        for output in completion.outputs:
            tokens = np.concatenate([prompt, output.token_ids])
            mask = np.arange(len(tokens)) >= len(prompt)
            sequences.append(TrainSequence(id=str(len(sequences)), tokens=tokens, media=media, loss_mask=mask))
            mine.append(output.logprobs)
    (micro,) = pack(sequences)
    trainer = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=0.01))
    trainer.build(reference.spec, MeshInfo(role="actor_train", num_threads=1))
    try:
        trained = trainer.forward(micro, WantedOutputs(logprobs=True, temperature=0.8)).logprobs_T.detach().numpy()
    finally:
        trainer.close()
    np.testing.assert_allclose(np.concatenate(mine), trained[micro.loss_mask_T.numpy()], atol=1e-4)


def test_blank_image_changes_logprobs(reference, with_engine):
    prompt, media = reference.prompt("See # now", 0)
    _, blank = reference.prompt("See # now", 0, fill=255)

    async def act(engine):
        return await together(
            engine, ask("seen", prompt, media, prompt_logprobs=True), ask("blank", prompt, blank, prompt_logprobs=True)
        )

    seen, other = with_engine(act, spec=reference.spec)
    after = int(np.flatnonzero(prompt == IDS[IMAGE_TOKEN])[-1]) + 1
    assert np.abs(seen.prompt_logprobs[after:] - other.prompt_logprobs[after:]).max() > 0.01
    assert not np.array_equal(seen.outputs[0].logprobs, other.outputs[0].logprobs)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_the_models_memory_of_positions_is_not_used(tmp_path, with_engine, monkeypatch, model_type):
    """`rope_deltas` are those of the last forward pass with images, whichever its rows."""
    reference = Reference(tiny_vision(tmp_path, model_type))
    prompts = mixed_prompts(reference)
    kind = type(reference.model.model)
    forward = kind.forward

    @wraps(forward)
    def forgetful(self, *args, **kwargs):
        self.rope_deltas = torch.tensor([[1000]])
        return forward(self, *args, **kwargs)

    async def act(engine):
        return await together(engine, *[ask(str(i), *prompt) for i, prompt in enumerate(prompts)])

    monkeypatch.setattr(kind, "forward", forgetful)
    completions = with_engine(act, spec=reference.spec)
    monkeypatch.undo()
    for (prompt, media), completion in zip(prompts, completions, strict=True):
        (output,) = completion.outputs
        np.testing.assert_allclose(output.logprobs, reference.logprobs(prompt, media, output.token_ids), atol=1e-4)


def test_interrupted_response_continues_with_the_images(reference, with_engine):
    prompt, media = reference.prompt("# and # then", 0, 1)

    async def act(engine):
        (whole,) = await together(engine, ask("whole", prompt, media))
        begun = whole.outputs[0].token_ids[:5]
        (rest,) = await together(engine, ask("rest", np.concatenate([prompt, begun]), media, max_new_tokens=7))
        return whole.outputs[0], rest.outputs[0]

    whole, rest = with_engine(act, spec=reference.spec)
    np.testing.assert_array_equal(rest.token_ids, whole.token_ids[5:])
    np.testing.assert_allclose(rest.logprobs, whole.logprobs[5:], atol=1e-4)


@pytest.mark.parametrize("kept", ["keep", "recompute"])
def test_running_rows_continue_after_weight_update(reference, with_engine, half_drawn, kept):
    prompts = mixed_prompts(reference)
    weights = {name: value.detach().clone() for name, value in reference.model.named_parameters()}

    async def act(engine):
        requests = [ask(str(i), *prompt, seed=i, temperature=1.0) for i, prompt in enumerate(prompts)]
        tasks = await half_drawn(engine, requests)
        await engine.update_weights(1, make_manifest(1, weights.items()), weights.items())
        return await asyncio.gather(*tasks)

    for (prompt, media), completion in zip(
        prompts, with_engine(act, spec=reference.spec, kv_after_update=kept), strict=True
    ):
        (output,) = completion.outputs
        assert set(output.versions) == {0, 1}
        np.testing.assert_allclose(output.logprobs, reference.logprobs(prompt, media, output.token_ids), atol=1e-4)


def test_images_are_seen_with_new_weights_after_sleep(qwen, with_engine):
    prompt, media = qwen.prompt("# colour", 0)
    moved = Reference(qwen.spec.path)
    with torch.no_grad():
        for parameter in moved.model.parameters():
            parameter.mul_(1.2)
    weights = dict(moved.model.named_parameters())

    async def act(engine):
        (before,) = await together(engine, ask("before", prompt, media))
        await engine.sleep()
        await engine.wake()
        await engine.update_weights(1, make_manifest(1, weights.items()), weights.items())
        (after,) = await together(engine, ask("after", prompt, media))
        return before.outputs[0], after.outputs[0]

    before, after = with_engine(act, spec=qwen.spec)
    assert np.abs(before.logprobs - after.logprobs).max() > 0.01
    np.testing.assert_allclose(after.logprobs, moved.logprobs(prompt, media, after.token_ids), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_images_are_never_sampled(qwen, with_engine, temperature):
    prompt, media = qwen.prompt("#?", 0)
    text, _ = qwen.prompt("A text.")
    weights = {name: value.detach().clone() for name, value in qwen.model.named_parameters()}
    liked = IDS[IMAGE_TOKEN]
    weights["lm_head.weight"][liked] = 1.5 * weights["lm_head.weight"][qwen.logits(prompt, media)[-1].argmax()]
    expected = Reference(qwen.spec.path)
    expected.model.load_state_dict(weights, strict=False)

    assert expected.logits(prompt, media)[-1].argmax() == liked

    async def act(engine):
        await engine.update_weights(1, make_manifest(1, weights.items()), weights.items())
        requests = [ask("image", prompt, media, n=8, seed=1, temperature=temperature, max_new_tokens=40)]
        requests.append(ask("text", text, n=8, seed=2, temperature=temperature, max_new_tokens=40))
        return await together(engine, *requests)

    completions = with_engine(act, spec=qwen.spec)
    for (ids, images), completion in zip([(prompt, media), (text, ())], completions, strict=True):
        for output in completion.outputs:
            assert not np.isin(output.token_ids, qwen.processor.media_token_ids).any()
            np.testing.assert_allclose(output.logprobs, expected.logprobs(ids, images, output.token_ids), atol=1e-4)


def test_images_that_do_not_fit_the_prompt_are_refused(qwen, with_engine):
    prompt, media = qwen.prompt("# or #", 0, 1)
    good = ask("good", prompt, media)
    adjacent = np.array([7, *[IDS[IMAGE_TOKEN]] * (6 + 1), 8])
    requests = {
        "without images": ask("bad", prompt),
        "one missing": ask("bad", prompt, media[:1]),
        "one too many": ask("bad", prompt, [*media, media[0]]),
        "adjacent": ask("bad", adjacent, media),
        "broken": ask("bad", prompt, [replace(media[0], digest="0", data=b"none"), media[1]]),
    }

    async def act(engine):
        for request in requests.values():
            with raises_error(DataError, "bad"):
                await engine.generate(request)
        results = await asyncio.gather(
            engine.generate(good), engine.generate(requests["one missing"]), return_exceptions=True
        )
        assert isinstance(results[1], DataError)
        return results[0]

    (output,) = with_engine(act, spec=qwen.spec).outputs
    np.testing.assert_array_equal(output.token_ids, qwen.generate(prompt, media, 12))


def test_model_of_text_refuses_images(tiny_spec, qwen, with_engine):
    _, media = qwen.prompt("#", 0)

    async def act(engine):
        with raises_error(UnsupportedError, "bad", "1"):
            await engine.generate(ask("bad", np.array([3, 4]), media))

    with_engine(act)
