"""Causes planted into trainer or engine, from outside: the doctor names each first.

Patches stand in for faults of an engine's code; the doctor has no switch for them.
"""

import asyncio
import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from PIL import Image

from roll_core.cli.main import main
from roll_core.data.media import image_media
from roll_core.plugins.registry import load_registry
from roll_core.spec.fp8 import is_layers_weight, quantise_blocks, quantise_rows
from roll_core.spec.providers import InferProvider, TrainProvider
from roll_core.types import SamplingParams
from roll_infer_hf import decoder
from roll_infer_hf.decoder import Decoder
from roll_infer_hf.engine import HFInferStrategy
from roll_infer_hf.loaded_weights import LoadedAdapter, LoadedWeights
from roll_infer_hf.module_runner import ModuleRunner
from roll_infer_hf.sampler import Sampler
from roll_modeling.activations import recorded
from roll_modeling.images import ImageReader
from roll_modeling.model import load_model
from roll_modeling.strategy import HuggingFaceStrategy
from roll_modeling.task_model import TaskModel
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.images import ImageReference, random_image, write_image_model
from roll_testing.models import QWEN3, write_checkpoint
from roll_testing.runs import REWARDS, Runs
from roll_tools.mismatch_experiments import Pair
from roll_tools.mismatch_reference import ScoredTokens
from roll_tools.mismatch_sides import Part, Trainer
from shared_tests.mismatched_engine import LORA, export_base, train_adapters

VOCABULARY = 64
GEMMA = {"final_logit_softcapping": 6.0, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
SHAPES = {
    "llama": {"model_type": "llama"},
    "qwen3": {},
    "mistral": {"model_type": "mistral", "sliding_window": 12},
    "gemma2": {"model_type": "gemma2", "sliding_window": 64, **GEMMA},
    "mixture": {"model_type": "qwen3_moe", **MIXTURE},
    "qwen2": {"model_type": "qwen2"},
    "granite": {"model_type": "granite", "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE),
    },
}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Spec of a tiny model by architecture."""
    folder = tmp_path_factory.mktemp("mismatch")
    extra = {"max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2}
    return {"images": write_image_model(folder / "images")} | {
        name: write_checkpoint(folder / name, {**QWEN3, **extra, **keys}, task="causal_lm", vocab_size=VOCABULARY)
        for name, keys in SHAPES.items()
    }


@pytest.fixture
def pair(models) -> Callable[..., Pair]:
    """Makes a pair of trainer and engine, with changes of the engine's model or of the sampling."""
    registry = load_registry()
    rng = np.random.default_rng(0)
    common = rng.integers(3, 60, 34)
    prompts = [rng.integers(3, 60, length) for length in (5, 9, 14, 30)]
    prompts += [np.append(common, rng.integers(3, 60, 4)) for _ in range(2)]
    longer = [*prompts[:2], *(rng.integers(3, 60, length) for length in (120, 150))]

    def make(
        *,
        engine: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        trained_by: str = "hf_train",
        model: str = "qwen3",
        long: bool = False,
        **params: Any,
    ) -> Pair:
        spec, media = models[model], ()
        chosen = longer if long else prompts
        if model == "images":
            chosen, media = image_prompts(spec)
        return Pair(
            trainer=Part(
                provider=registry.find(TrainProvider, trained_by),
                config={},
                model=replace(spec, **(trainer or {})),
                key="actor_train",
            ),
            engine=Part(
                provider=registry.find(InferProvider, "hf_infer"),
                config={"kernels": "torch", **(config or {})},
                model=replace(spec, **(engine or {})),
                key="actor_infer",
            ),
            params=SamplingParams(**{"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True, **params}),
            prompts=chosen,
            media=media,
        )

    return make


def image_prompts(spec):
    """Prompts with one and two images."""
    reference = ImageReference(spec)
    media = [tuple(random_image(56, 56, seed) for seed in seeds) for seeds in ((0, 1), (2,), (3, 4))]
    return [reference.prompt(images) for images in media], media


def first(diagnosis) -> str:
    return diagnosis.causes[0].name if diagnosis.causes else ""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_equal_sides_have_no_cause(pair, dtype):
    diagnosis = pair(engine={"dtype": dtype}, trainer={"dtype": dtype}).diagnose()
    assert diagnosis.gap <= diagnosis.noise
    assert not diagnosis.causes


# -- plants ------------------------------------------------------------------------------------------------------------
# A plant takes monkeypatch and changes code of one side; it may return keywords of `pair`.


def before_generate(change):
    """The engine sees another request."""

    def plant(patch):
        generate = HFInferStrategy.generate
        patch.setattr(HFInferStrategy, "generate", lambda self, request: generate(self, change(request)))

    return plant


def prompt_of(change):
    return before_generate(
        lambda request: replace(request, prompt_ids=np.asarray(change(request.prompt_ids), np.int64))
    )


def temperature_of(value):
    def change(request):
        return (
            request if request.prompt_logprobs else replace(request, params=replace(request.params, temperature=value))
        )

    return before_generate(change)


def sampled_logprobs(change, *, needs_shaped=False):
    """The engine computes logprobs of the sampled tokens by `change(scaled logits)`."""

    def plant(patch):
        sample = Sampler.sample

        def faulty(self, logits):
            scaled = logits.clone() if self._temperature_N1 is None else logits / self._temperature_N1
            tokens, plain = sample(self, logits)
            if needs_shaped and self._shaped is None:
                return tokens, plain
            return tokens, change(scaled).gather(1, tokens[:, None])[:, 0].float()

        patch.setattr(Sampler, "sample", faulty)

    return plant


def nucleus(scaled, top_p=0.8):
    ordered = scaled.sort(descending=True)
    mass = ordered.values.softmax(-1)
    out = mass.cumsum(-1) - mass >= top_p
    return scaled.masked_fill(torch.zeros_like(out).scatter(1, ordered.indices, out), -torch.inf).log_softmax(-1)


def best(scaled, number=5):
    return scaled.masked_fill(scaled < scaled.topk(number).values[:, -1:], -torch.inf).log_softmax(-1)


def around(owner, name, change):
    """`change(original, self, *arguments)` instead of a method."""

    def plant(patch):
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda self, *args, **named: change(original, self, *args, **named))

    return plant


def low(tensor, dtype=torch.bfloat16):
    return tensor.to(dtype).to(tensor.dtype)


def bf16_head(original, self, hidden, *, record=True):
    normed = self._norm(hidden, self._final_norm)
    logits = F.linear(normed.bfloat16(), self._model.lm_head.weight.detach().bfloat16()).float()
    if record:
        self._record("model", norm=normed)
        self._record("", lm_head=logits)
    return logits


def bf16_weights_of_head(original, self):
    """The head's products are float32, its weights not."""
    original(self)
    weight = low(self._model.lm_head.weight.detach())
    self._head = lambda hidden: F.linear(hidden, weight)


def bf16_variance(original, self, x, epsilon):
    square = (x.bfloat16() ** 2).mean(-1, keepdim=True)
    return (square + epsilon.bfloat16()).rsqrt().float()


def bf16_products(self, cos, sin):
    """Products of position and frequency are rounded, cosines and sines are not."""
    frequencies = self._model.model.rotary_emb.inv_freq.bfloat16()
    angles = (torch.arange(len(cos)).bfloat16()[:, None, None] * frequencies).float()
    return angles.cos().repeat(1, 1, 2), torch.cat([-angles.sin(), angles.sin()], -1)


def kv_rounded(dtype):
    def change(original, self, layer, hidden, cos, sin):
        qk, value = original(self, layer, hidden, cos, sin)
        qk[:, self.num_heads :] = low(qk[:, self.num_heads :], dtype)
        return qk, low(value, dtype)

    return around(Decoder, "_project", change)


def rope_tables(change):
    def extended(original, self, num):
        known = len(self._cos)
        original(self, num)
        if len(self._cos) != known:
            self._cos, self._sin = change(self, self._cos, self._sin)

    return around(Decoder, "_need_positions", extended)


def with_inv_freq(change):
    def extended(original, self, num):
        module = self._model.model.rotary_emb
        if not getattr(module, "planted", False):
            module.planted, module.inv_freq = True, change(module.inv_freq)
        original(self, num)

    return around(Decoder, "_need_positions", extended)


def attention_scale(factor):
    def started(original, self, *args, **named):
        original(self, *args, **named)
        self.scale *= factor

    return around(Decoder, "__init__", started)


def norm_epsilon(value):
    def refreshed(original, self):
        original(self)
        self._epsilon = torch.full_like(self._epsilon, value)

    return around(Decoder, "refresh", refreshed)


def tied_head(original, self):
    original(self)
    self._head = lambda hidden: F.linear(hidden, self._embedding)


def frozen_head(original, self):
    """The head keeps a copy from before the update."""
    kept = getattr(self, "_planted_head", None)
    original(self)
    if kept is None:
        weight = self._model.lm_head.weight.detach().clone()
        kept = self._planted_head = lambda hidden: F.linear(hidden, weight)
    self._head = kept


def after_update(change):
    def replaced(original, self, manifest, incoming, *, shared):
        digests = original(self, manifest, incoming, shared=shared)
        change(self._loaded)
        return digests

    return around(LoadedWeights, "replace", replaced)


def nudged(loaded):
    loaded["model.layers.1.mlp.down_proj.weight"].data += 0.05


def transposed(loaded):
    weight = loaded["model.layers.0.self_attn.o_proj.weight"]
    weight.data = weight.data.T.clone()


def halves(loaded):
    for weight in loaded.values():
        weight.data = low(weight.data, torch.float16)


def skipped(original, self, manifest, incoming, *, shared):
    before = self._loaded["model.layers.0.mlp.up_proj.weight"].data.clone()
    digests = original(self, manifest, incoming, shared=shared)
    self._loaded["model.layers.0.mlp.up_proj.weight"].data.copy_(before)
    return digests


def donated(original, self, index, chunks, bounds, qk, value):
    """Keys taken from another prompt are doubled."""
    found = original(self, index, chunks, bounds, qk, value)
    for chunk in chunks:
        if chunk.prompt.donor is not None and chunk.begin == chunk.prompt.donated:
            chunk.prompt.cache.values[index][chunk.prompt.slot, :, : chunk.begin] *= 1.5
    return found


def moved_prefix(original, self, index, chunks, bounds, qk, value):
    """Keys taken from another prompt are those of the token before."""
    found = original(self, index, chunks, bounds, qk, value)
    for chunk in chunks:
        if chunk.prompt.donor is not None and chunk.begin == chunk.prompt.donated:
            keys = chunk.prompt.cache.keys[index][chunk.prompt.slot, :, : chunk.begin]
            keys.copy_(keys.roll(1, 1))
    return found


def in_batches(original, self, tokens):
    logits = original(self, tokens)
    return logits * 1.3 if len(tokens) > 2 else logits


def in_chunks(original, self, layer, hidden, attended):
    if getattr(self, "_later_chunk", False):
        attended = attended * 1.5
    return original(self, layer, hidden, attended)


def chunks(original, self, chunks):
    self._later_chunk = any(chunk.begin > chunk.prompt.donated for chunk in chunks)
    try:
        return original(self, chunks)
    finally:
        self._later_chunk = False


def decoding(original, self, index, query, width, bias):
    return original(self, index, query, width, bias) + 0.3


def positions(original, self, tokens):
    """Positions of generated tokens are too large by 3."""
    return with_places(self, lambda places: places + 3, original, tokens)


def later_positions(original, self, chunks):
    """Positions of later chunks are too large by 3."""
    if not any(chunk.begin > chunk.prompt.donated for chunk in chunks):
        return original(self, chunks)
    return with_places(self, lambda places: places + 3 * (places >= 12), original, chunks)


def counted_through(original, self, chunks):
    """Positions of a prefill of many prompts do not begin anew at each."""
    return with_places(self, lambda places: torch.arange(len(places)) + places[0], original, chunks)


def with_places(decoder, change, original, *args):
    """A call during which positions are other ones."""
    rope = decoder._rope
    decoder._rope = lambda places: rope(change(places))
    try:
        return original(decoder, *args)
    finally:
        del decoder._rope


def chunked(patch):
    around(Decoder, "prefill", chunks)(patch)
    around(Decoder, "_finish_layer", in_chunks)(patch)


def before_task_model(change):
    def started(original, self, model, *args, **named):
        change(model)
        original(self, model, *args, **named)

    return around(TaskModel, "__init__", started)


def trainer_temperature(original, self, micro, want, host=None):
    return original(self, micro, replace(want, temperature=1.0), host)


def trainer_model(change):
    def loaded(original, self, device):
        model = original(self, device)
        change(model)
        return model

    return around(HuggingFaceStrategy, "_load_model", loaded)


def wrong_epsilon(model):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.1


def wrong_scaling(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.4


def trainer_tied_head(model):
    """The trainer exports a head that it does not use."""
    embedding = model.get_input_embeddings().weight
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] @ embedding.T,))
    model.lm_head.forward = lambda logits: logits


def packed_leak(original, self, micro, want, host=None):
    outputs = original(self, micro, want, host)
    if len(micro.lengths) > 1:
        outputs = replace(outputs, logprobs_T=outputs.logprobs_T * 0.8)
    return outputs


def hidden(**overrides):
    """The engine's model has other values of keys than its config."""

    def started(original, self, model, mesh):
        return original(self, replace(model, config_overrides={**model.config_overrides, **overrides}), mesh)

    return around(HFInferStrategy, "start", started)


class Replaced:
    """A module with other functions."""

    def __init__(self, module, **functions):
        self.__dict__.update(module=module, **functions)

    def __getattr__(self, name):
        return getattr(self.module, name)


def softmax_in(dtype, *, probabilities=False):
    """Both of the engine's ways to attend: in a dtype, or float32 whose `probabilities` alone are rounded."""

    def softmax(scores, dim):
        if probabilities:
            return low(torch.softmax(scores, dim), dtype)
        return torch.softmax(scores.to(dtype), dim).to(scores.dtype)

    def attend(query, key, value, attn_mask=None, is_causal=False, scale=None, **_):
        scores = query @ key.transpose(-1, -2) * scale
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        return softmax(scores, -1) @ value

    def plant(patch):
        patch.setattr(decoder, "torch", Replaced(torch, softmax=softmax))
        patch.setattr(decoder, "F", Replaced(F, scaled_dot_product_attention=attend))

    return plant


def gates(change):
    """Other logits of the engine's routers: `change(original, hidden)`."""

    def started(original, self, model, **named):
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.forward = partial(change, module.forward)
        original(self, model, **named)

    return around(ModuleRunner, "__init__", started)


def bf16_gate(original, hidden):
    weight = original.__self__.weight
    kept, weight.data = weight.data, weight.data.bfloat16()
    try:
        logits, scores, experts = original(hidden.bfloat16())
        return logits.float(), scores.float(), experts
    finally:
        weight.data = kept


def third_gate(original, hidden):
    """The third expert instead of the second if both are near."""
    router = original.__self__
    logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    best = logits.softmax(-1).topk(3)
    near = best.values[:, 1] - best.values[:, 2] < 0.1
    chosen = torch.stack([torch.zeros_like(near, dtype=torch.long), near.long() + 1], 1)
    values = best.values.gather(1, chosen)
    return logits, values / values.sum(-1, keepdim=True), best.indices.gather(1, chosen)


def fp8_rows(weight):
    values, scale = quantise_rows(weight)
    return values.float() * scale


def fp8_blocks(weight):
    """The matrices of these models have one block each."""
    values, scale = quantise_blocks(weight)
    assert scale.numel() == 1
    return values.float() * scale


def layers(change):
    def changed(loaded):
        for name, weight in loaded.items():
            if weight.ndim == 2 and is_layers_weight(name):
                weight.data = change(weight.data)

    return after_update(changed)


def doubled_adapter(patch):
    train_adapters(patch)

    def merged(original, self, adapter):
        original(self, {name: tensor * 2 if ".lora_B" in name else tensor for name, tensor in adapter.items()})

    around(LoadedAdapter, "_merge", merged)(patch)


def unmerged(patch):
    train_adapters(patch)
    export_base(patch)


def pixels_of(change):
    return before_generate(lambda request: replace(request, media=change(request.media)))


def black(media):
    return tuple(image_media(Image.new("RGB", (image.width, image.height))) for image in media)


def text_positions(patch):
    """The engine counts image tokens as text."""
    generating = []

    def counted(original, self, tokens_T, *args):
        return torch.arange(len(tokens_T)).expand(3, -1) if generating else original(self, tokens_T, *args)

    def prefilled(original, self, chunks):
        generating.append(True)
        try:
            return original(self, chunks)
        finally:
            generating.pop()

    around(ImageReader, "_positions", counted)(patch)
    around(ModuleRunner, "prefill", prefilled)(patch)


def unshifted(original, self, cohort, *args):
    """Generated tokens after images have the positions of text."""
    inputs = original(self, cohort, *args)
    cohort.shifts_AN1 = torch.zeros_like(cohort.shifts_AN1)
    return inputs


def other_head(original, self):
    """The trainer exports another head than it computes with."""
    return ((name, tensor * (0.9 if name.startswith("lm_head") else 1)) for name, tensor in original(self))


def stale_norms(original, self, manifest, incoming, *, shared):
    updated, self.planted = getattr(self, "planted", False), True
    old = {name: tensor.data.clone() for name, tensor in self._loaded.items() if tensor.ndim == 1 and updated}
    digests = original(self, manifest, incoming, shared=shared)
    for name, tensor in old.items():
        self._loaded[name].data.copy_(tensor)
    return digests


def dropout(original, self, micro, want, host=None):
    hooks = [
        module.register_forward_hook(lambda _, args, output: F.dropout(output, 0.1))
        for name, module in self.model.named_modules()
        if name.endswith("mlp")
    ]
    try:
        return original(self, micro, want, host)
    finally:
        for hook in hooks:
            hook.remove()


def scaled_outputs(part, end):
    """The engine computes something else in a part of the model."""

    def started(original, self, model, **named):
        for name, module in model.named_modules():
            if part in name and name.endswith(end):
                module.register_forward_hook(lambda _, args, output: output * 1.5)
        original(self, model, **named)

    return around(ModuleRunner, "__init__", started)


def lighter(media):
    pictures = (Image.open(io.BytesIO(image.data)).convert("RGB") for image in media)
    return tuple(image_media(picture.point(lambda value: 60 + value // 2)) for picture in pictures)


def hidden_top_p(patch):
    """The engine samples with a top-p that the config does not have."""
    before_generate(lambda request: replace(request, params=replace(request.params, top_p=0.8)))(patch)
    sampled_logprobs(nucleus, needs_shaped=True)(patch)


def hidden_top_k(patch):
    """The engine samples with a top-k that the config does not have."""
    before_generate(lambda request: replace(request, params=replace(request.params, top_k=23)))(patch)
    sampled_logprobs(partial(best, number=23), needs_shaped=True)(patch)


def first_logprobs(patch):
    """The logprob of the first sampled token is too small."""
    generate = HFInferStrategy.generate

    async def changed(self, request):
        completion = await generate(self, request)
        outputs = [
            replace(output, logprobs=output.logprobs - np.eye(1, len(output.logprobs))[0])
            for output in completion.outputs
        ]
        return replace(completion, outputs=tuple(outputs))

    patch.setattr(HFInferStrategy, "generate", changed)


def hidden_min_p(patch):
    """The engine samples with a min-p that the config does not have."""

    def change(scaled):
        probs = scaled.softmax(-1)
        return scaled.masked_fill(probs < 0.1 * probs.amax(-1, keepdim=True), -torch.inf).log_softmax(-1)

    before_generate(lambda request: replace(request, params=replace(request.params, min_p=0.1)))(patch)
    sampled_logprobs(change, needs_shaped=True)(patch)


def without_tokens(*ids):
    """The engine samples after it has banned some tokens."""

    def plant(patch):
        sample = Sampler.sample
        banned = torch.zeros(VOCABULARY).index_fill(0, torch.tensor(ids), -torch.inf)
        patch.setattr(Sampler, "sample", lambda self, logits: sample(self, logits + banned))

    return plant


def penalised(change):
    """The engine subtracts `change(counts)` from logits; `counts` are those of the response's tokens."""

    def plant(patch):
        generate = HFInferStrategy.generate

        async def changed(self, request):
            completion = await generate(self, request)
            if request.prompt_logprobs:
                return completion
            return replace(completion, outputs=tuple(rescored(self, request, output) for output in completion.outputs))

        def rescored(self, request, output):
            begin, ids = len(request.prompt_ids), np.concatenate([request.prompt_ids, output.token_ids])
            tokens = torch.from_numpy(ids.astype(np.int64))
            with torch.no_grad():
                logits = self._model(input_ids=tokens[None], use_cache=False).logits[0, begin - 1 : -1]
            counts = F.one_hot(tokens[begin:], logits.shape[1]).cumsum(0).roll(1, 0)
            counts[0] = 0
            logprobs = (logits - change(counts)).log_softmax(-1).gather(1, tokens[begin:, None])[:, 0]
            return replace(output, logprobs=logprobs.numpy())

        patch.setattr(HFInferStrategy, "generate", changed)

    return plant


def best_logprobs(patch):
    """The engine returns the logprob of the most likely token."""
    sample = Sampler.sample

    def faulty(self, logits):
        best = logits.log_softmax(-1).amax(-1)
        return sample(self, logits)[0], best

    patch.setattr(Sampler, "sample", faulty)


def int8_weight(loaded):
    weight = loaded["model.layers.0.mlp.down_proj.weight"]
    scale = weight.data.abs().max() / 127
    weight.data = (weight.data / scale).round() * scale


def refreshed(change):
    """The decoder is changed each time it has read its weights."""

    def plant(patch):
        def refresh(original, self):
            original(self)
            change(self)

        around(Decoder, "refresh", refresh)(patch)

    return plant


def reversed_layers(self):
    self._layers.reverse()


def without_qk_norms(self):
    for layer in self._layers:
        layer.qk_norm_HD = None


def neighbouring_pairs(original, self, layer, hidden, cos, sin):
    """Neighbouring units of a head are rotated as a pair."""
    qk, value = original(self, layer, hidden, torch.ones_like(cos), torch.zeros_like(sin))
    half = self.head_dim // 2
    cos, sin, first, second = cos[..., :half], sin[..., half:], qk[..., 0::2], qk[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2), value


def bf16_residual(original, self, layer, hidden, attended):
    original(self, layer, hidden, attended)
    hidden.copy_(low(hidden))


def fp8_inputs(original, self, x):
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 448
    return original(self, (x / scale).to(torch.float8_e4m3fn).float() * scale)


def engine_module(change):
    """transformers' model of the engine is another one."""

    def started(original, self, model, **named):
        change(model)
        original(self, model, **named)

    return around(ModuleRunner, "__init__", started)


def norms_without_one(model):
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(lambda module, x: module._norm(x.float()) * module.weight, module)


def unscaled_embeddings(model):
    factor = model.config.hidden_size**-0.5
    model.get_input_embeddings().register_forward_hook(lambda _, args, output: output * factor)


def without_last_logprob(patch):
    generate = HFInferStrategy.generate

    async def changed(self, request):
        completion = await generate(self, request)
        outputs = [
            replace(output, logprobs=output.logprobs * (np.arange(len(output.logprobs)) < len(output.logprobs) - 1))
            for output in completion.outputs
        ]
        return replace(completion, outputs=tuple(outputs))

    patch.setattr(HFInferStrategy, "generate", changed)


def both_sides(**values):
    return {"engine": values, "trainer": values}


PLANTS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "nudged weight": ("weights.differ", after_update(nudged), {}),
    "transposed weight": ("weights.differ", after_update(transposed), {}),
    "halves": ("weights.rounded", after_update(halves), {}),
    "skipped weight": ("weights.stale", around(LoadedWeights, "replace", skipped), {}),
    "frozen head": ("weights.stale", around(Decoder, "refresh", frozen_head), {}),
    "truncated prompt": ("inputs.truncation", prompt_of(lambda ids: ids[-10:]), {}),
    "start of sequence added": ("inputs.special_tokens", prompt_of(lambda ids: np.append(1, ids)), {}),
    "first token dropped": ("inputs.special_tokens", prompt_of(lambda ids: ids[1:]), {}),
    "raw logprobs": (
        "sampling.temperature",
        sampled_logprobs(lambda x: (x * 0.7).log_softmax(-1)),
        {"temperature": 0.7},
    ),
    "other temperature": ("sampling.temperature", temperature_of(0.85), {}),
    "top-p logprobs": ("sampling.processed_logprobs", sampled_logprobs(nucleus, needs_shaped=True), {"top_p": 0.8}),
    "top-k logprobs": ("sampling.processed_logprobs", sampled_logprobs(best, needs_shaped=True), {"top_k": 5}),
    "logprobs in bf16": ("arithmetic.logprobs", sampled_logprobs(lambda x: x.bfloat16().log_softmax(-1)), {}),
    "rope theta key": (
        "model.rope",
        lambda patch: None,
        {"engine": {"config_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 9000.0}}}},
    ),
    "epsilon key": ("model.norm_epsilon", lambda patch: None, {"engine": {"config_overrides": {"rms_norm_eps": 0.05}}}),
    "rope theta": ("model.rope", with_inv_freq(lambda x: x**1.4), {}),
    "rope scaling": ("model.rope_scaling", with_inv_freq(lambda x: x / 4), {"model": "llama"}),
    "attention scale": ("model.attention_scale", attention_scale(1.4), {}),
    "epsilon": ("model.norm_epsilon", norm_epsilon(0.02), {}),
    "tied head": ("model.tied_head", around(Decoder, "refresh", tied_head), {}),
    "dtype": ("arithmetic.dtype", lambda patch: None, {"engine": {"dtype": "bf16"}}),
    "bf16 head": ("arithmetic.head", around(Decoder, "_logits", bf16_head), {}),
    "bf16 norms": (
        "arithmetic.norm",
        around(Decoder, "_norm", lambda original, self, x, w: low(original(self, low(x), low(w)))),
        {},
    ),
    "bf16 weights of the head": ("arithmetic.head", around(Decoder, "refresh", bf16_weights_of_head), {}),
    "bf16 variance": ("arithmetic.norm", around(Decoder, "_inverse_rms", bf16_variance), {}),
    "bf16 products of rope": ("arithmetic.rope", rope_tables(bf16_products), {}),
    "bf16 rope": ("arithmetic.rope", rope_tables(lambda self, cos, sin: (low(cos), low(sin))), {}),
    "bf16 keys": ("arithmetic.kv_dtype", kv_rounded(torch.bfloat16), {}),
    "fp8 keys": ("arithmetic.kv_dtype", kv_rounded(torch.float8_e4m3fn), {"model": "llama"}),
    "prefix cache": ("engine.prefix_cache", around(Decoder, "_attend_chunks", donated), {}),
    "moved prefix": ("engine.prefix_cache", around(Decoder, "_attend_chunks", moved_prefix), {}),
    "positions of a batch": ("engine.batch", around(Decoder, "prefill", counted_through), {}),
    "batch": ("engine.batch", around(Decoder, "decode", in_batches), {}),
    "decoding": ("engine.decode", around(Decoder, "_attend_rows", decoding), {}),
    "trainer's temperature": (
        "sampling.temperature",
        around(TaskModel, "outputs", trainer_temperature),
        {"temperature": 0.6},
    ),
    "trainer's epsilon": ("model.norm_epsilon", trainer_model(wrong_epsilon), {}),
    "trainer's scale": ("model.attention_scale", trainer_model(wrong_scaling), {"model": "llama"}),
    "trainer's tied head": ("model.tied_head", trainer_model(trainer_tied_head), {}),
    "trainer's packing": ("trainer.packing", around(TaskModel, "outputs", packed_leak), {}),
    "sharded trainer's epsilon": (
        "model.norm_epsilon",
        before_task_model(wrong_epsilon),
        {"trained_by": "fsdp2_train"},
    ),
    "sharded trainer's scale": (
        "model.attention_scale",
        before_task_model(wrong_scaling),
        {"trained_by": "fsdp2_train", "model": "llama"},
    ),
    "chunked prefill": (
        "engine.max_num_batched_tokens",
        chunked,
        {"config": {"max_num_batched_tokens": 12}},
    ),
    "positions of chunks": (
        "engine.max_num_batched_tokens",
        around(Decoder, "prefill", later_positions),
        {"config": {"max_num_batched_tokens": 12}},
    ),
    "positions": ("inputs.positions", around(Decoder, "decode", positions), {}),
    "window off by one": ("model.sliding_window", hidden(sliding_window=11), {"model": "mistral"}),
    "ignored window": ("model.sliding_window", hidden(sliding_window=None), {"model": "mistral"}),
    "long window": (
        "model.sliding_window",
        hidden(sliding_window=90),
        {"model": "mistral", "long": True, **both_sides(config_overrides={"sliding_window": None})},
    ),
    "long truncated prompt": ("inputs.truncation", prompt_of(lambda ids: ids[-100:]), {"long": True}),
    "cap of logits": ("model.logit_softcap", hidden(final_logit_softcapping=4.0), {"model": "gemma2"}),
    "cap of scores": ("model.attention_softcap", hidden(attn_logit_softcapping=2.0), {"model": "gemma2"}),
    "bf16 softmax": ("arithmetic.softmax", softmax_in(torch.bfloat16), {}),
    "bf16 probabilities": ("arithmetic.softmax", softmax_in(torch.bfloat16, probabilities=True), {}),
    "bf16 router": ("arithmetic.router", gates(bf16_gate), {"model": "mixture"}),
    "other experts": ("model.router_replay", gates(third_gate), {"model": "mixture"}),
    "fp8 blocks": ("weights.rounded", layers(fp8_blocks), {}),
    "fp8 weights": ("weights.rounded", layers(fp8_rows), {}),
    "adapter twice": ("model.lora_scale", doubled_adapter, both_sides(lora=LORA)),
    "adapter not merged": ("model.lora_merge", unmerged, {"trainer": {"lora": LORA}}),
    "black images": ("inputs.image_pixels", pixels_of(black), {"model": "images"}),
    "images in another order": ("inputs.image_pixels", pixels_of(lambda media: media[::-1]), {"model": "images"}),
    "lighter images": ("inputs.images", pixels_of(lighter), {"model": "images"}),
    "image encoder": ("arithmetic.vision", scaled_outputs("visual", "mlp"), {"model": "images"}),
    "layers of images": ("arithmetic.linear", scaled_outputs("language_model", "o_proj"), {"model": "images"}),
    "system prompt": ("inputs.template", prompt_of(lambda ids: [7, 8, 9, *ids]), {}),
    "end of the prompt dropped": ("inputs.template", prompt_of(lambda ids: ids[:-1]), {}),
    "stale norms": ("weights.stale", around(LoadedWeights, "replace", stale_norms), {}),
    "trainer's dropout": ("trainer.random", around(TaskModel, "outputs", dropout), {}),
    "trainer's export": ("weights.exported", around(HFTrainStrategy, "export_weights", other_head), {}),
    "top-p that no key names": ("sampling.top_p", hidden_top_p, {}),
    "first token": ("tokens.first", first_logprobs, {}),
    "experts' norm": ("model.router", hidden(norm_topk_prob=False), {"model": "mixture"}),
    "one expert": ("model.router", hidden(num_experts_per_tok=1), {"model": "mixture"}),
    "top-k that no key names": ("sampling.top_k", hidden_top_k, {}),
    "unknown ids": ("inputs.template", prompt_of(lambda ids: np.where(ids >= 45, 3, ids)), {}),
    "positions after images": (
        "inputs.image_positions",
        around(ModuleRunner, "_image_inputs", unshifted),
        {"model": "images"},
    ),
    "image positions": ("inputs.image_positions", text_positions, {"model": "images"}),
    "min-p that no key names": ("sampling.min_p", hidden_min_p, {}),
    "presence penalty": ("sampling.presence_penalty", penalised(lambda counts: 0.8 * (counts > 0)), {}),
    "frequency penalty": ("sampling.frequency_penalty", penalised(lambda counts: 0.4 * counts), {}),
    "banned tokens": ("sampling.logit_bias", without_tokens(5, 9, 20), {"temperature": 0.8}),
    "best token's logprobs": ("sampling.argmax_logprobs", best_logprobs, {}),
    "missing logprob": ("masks.missing_logprobs", without_last_logprob, {}),
    "clamped positions": (
        "inputs.positions",
        around(Decoder, "_rope", lambda original, self, positions: original(self, positions.clamp(max=31))),
        {},
    ),
    "first token twice": ("inputs.special_tokens", prompt_of(lambda ids: np.append(ids[0], ids)), {}),
    "end of the prompt replaced": ("inputs.template", prompt_of(lambda ids: np.append(ids[:-1], 11)), {}),
    "end of the prompt truncated": ("inputs.truncation", prompt_of(lambda ids: ids[:10]), {}),
    "int8 weight": ("weights.rounded", after_update(int8_weight), {}),
    "layers in reverse order": ("weights.exchanged", refreshed(reversed_layers), {}),
    "trainer's export in bf16": (
        "weights.exported",
        around(HFTrainStrategy, "export_weights", lambda original, self: ((n, low(t)) for n, t in original(self))),
        {},
    ),
    "bf16 residual": ("arithmetic.residual", around(Decoder, "_finish_layer", bf16_residual), {}),
    "fp8 activations": ("arithmetic.linear", around(decoder.Projection, "__call__", fp8_inputs), {}),
    "other activation": (
        "model.activation",
        lambda patch: patch.setattr(decoder, "F", Replaced(F, silu=F.gelu)),
        {},
    ),
    "no biases": ("model.bias", lambda patch: patch.setattr(decoder, "_bias", lambda layer: None), {"model": "qwen2"}),
    "no norms of queries": ("model.skipped", refreshed(without_qk_norms), {}),
    "neighbouring pairs": ("model.rope", around(Decoder, "_project", neighbouring_pairs), {}),
    "norms without one": ("model.norm_offset", engine_module(norms_without_one), {"model": "gemma2"}),
    "unscaled embeddings": ("model.embedding_scale", engine_module(unscaled_embeddings), {"model": "gemma2"}),
    "rope of some layers": (
        "model.rope",
        hidden(rope_parameters={"sliding_attention": {**ROPE, "rope_theta": 5000.0}, "full_attention": ROPE}),
        {"model": "gemma3"},
    ),
    "residual multiplier": ("model.config", hidden(residual_multiplier=1.0), {"model": "granite"}),
    "temperature in bf16": ("sampling.temperature", temperature_of(0.8), both_sides(dtype="bf16")),
}


FAST = {
    *("nudged weight", "skipped weight", "int8 weight", "truncated prompt", "start of sequence added"),
    *("raw logprobs", "other temperature", "top-p logprobs", "banned tokens", "dtype", "rope theta key"),
    *("bf16 head", "bf16 norms", "bf16 keys", "other activation", "epsilon", "prefix cache", "batch"),
    *("trainer's temperature", "trainer's packing", "trainer's dropout", "trainer's export", "stale norms"),
    *("first token", "missing logprob", "adapter not merged", "system prompt", "logprobs in bf16"),
}
"""Plants of each branch that take the least time."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in FAST else [pytest.mark.slow(ci=True)]) for case in PLANTS]
)
def test_planted_cause_is_the_first(pair, monkeypatch, case):
    expected, plant, keys = PLANTS[case]
    plant(monkeypatch)
    diagnosis = pair(**keys).diagnose()
    assert first(diagnosis) == expected, diagnosis


@pytest.mark.slow(ci=True)
def test_both_of_two_causes_are_named(pair, monkeypatch):
    attention_scale(1.4)(monkeypatch)
    temperature_of(0.8)(monkeypatch)
    causes = {cause.name for cause in pair(model="llama").diagnose().causes}
    assert causes == {"model.attention_scale", "sampling.temperature"}


@pytest.mark.slow(ci=True)
def test_causes_of_both_sides_are_named(pair, monkeypatch):
    trainer_model(wrong_epsilon)(monkeypatch)
    causes = pair(model="llama", engine={"dtype": "bf16"}).diagnose().causes
    assert causes[0].name == "model.norm_epsilon"


@pytest.mark.slow(ci=True)
def test_unknown_fault_is_located(pair, monkeypatch):
    """No edit reproduces it; the activations tell where it begins."""
    around(Decoder, "_norm", lambda original, self, x, w: original(self, x, w) + 0.1 * torch.sin(9 * x))(monkeypatch)
    assert first(pair().diagnose()) == "arithmetic.norm"


@pytest.mark.slow(ci=True)
def test_engine_without_activations_names_the_branch(pair, monkeypatch):
    plain = pair()
    blind = replace(plain.engine.provider, capabilities=replace(plain.engine.provider.capabilities, activations=False))
    attention_scale(1.4)(monkeypatch)
    diagnosis = replace(plain, engine=replace(plain.engine, provider=blind)).diagnose()
    assert first(diagnosis) == "model.attention_scale"
    assert diagnosis.not_examined


@pytest.mark.parametrize("strategy", ["hf_train", "fsdp2_train"])
def test_activations_of_trainers_equal_transformers(models, strategy):
    part = Part(
        provider=load_registry().find(TrainProvider, strategy), config={}, model=models["qwen3"], key="actor_train"
    )
    tokens = np.arange(3, 20)
    trainer = Trainer(part, "cpu")
    try:
        found = asyncio.run(trainer.activations(ScoredTokens(tokens, 1)))
    finally:
        trainer.strategy.close()
    model = load_model(models["qwen3"])
    with recorded(model) as expected, torch.no_grad():
        model(input_ids=torch.from_numpy(tokens)[None], use_cache=False)
    assert "model.layers.1.mlp.down_proj" in found
    for name in found.keys() & expected.keys():
        assert torch.allclose(found[name].flatten(), expected[name].flatten(), atol=1e-4), name


def test_command_examines_a_config(local_config, capsys):
    code = main(["doctor", "mismatch", str(local_config), "--json", "actor_infer.model_args.dtype=bf16"])
    found = json.loads(capsys.readouterr().out)
    assert code == 1
    assert [cause["name"] for cause in found["causes"]] == ["arithmetic.dtype"]
    assert found["causes"][0]["fix"] == "actor_infer.model_args.dtype: fp32"


@pytest.fixture
def local_config(tmp_path, monkeypatch):
    """A config with a small model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollrewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "rlvr.yaml"
    path.write_text(yaml.safe_dump(Runs(tmp_path, "local").rlvr()), encoding="utf-8")
    return path
