"""Causes planted around and into a real vLLM engine: `roll-core doctor mismatch` names each first."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
from vllm_live import CACHE, start

from roll_testing.infer.models import SMALL
from roll_testing.models import write_checkpoint
from shared_tests.mismatched_engine import (
    LORA,
    Mismatched,
    ScaledAdapter,
    Stale,
    corrupted,
    export_base,
    first,
    prompt_of,
    temperature_of,
    train_adapters,
)

pytestmark = pytest.mark.engine("vllm")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One engine for all plants; its process runs functions of this module."""
    import cloudpickle  # vLLM requires it

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    spec = write_checkpoint(
        tmp_path_factory.mktemp("mismatch") / "model",
        {**SMALL, "bos_token_id": 2},
        task="causal_lm",
        vocab_size=64,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        live = start(spec)
        yield Mismatched(live, "vllm", CACHE)
        live.close()


def inside(change):
    """Runs `change(worker)` in vLLM's process after each update."""

    def plant(engine):
        async def updated():
            await engine.live.strategy._ready.collective_rpc(change)

        return {"updated": updated}

    return plant


def modules(worker, name):
    return [module for module in worker.model_runner.get_model().modules() if hasattr(module, name)]


def rope(worker):
    for module in modules(worker, "cos_sin_cache")[:1]:
        if not hasattr(module, "planted"):
            module.planted, module.cos_sin_cache_before, module.base = module.base, module.cos_sin_cache, 900.0
            module.cos_sin_cache = module._compute_cos_sin_cache().to(module.cos_sin_cache)


def attention(worker, name, value):
    for module in modules(worker, "impl"):
        setattr(module.impl, name, value)


def scale(worker):
    attention(worker, "scale", 1.4 * 32**-0.5)


def window(worker):
    attention(worker, "sliding_window", 11)


def fp8_keys(worker):
    import torch

    def update(impl, layer, key, value, *cache):
        rounded = (tensor.to(torch.float8_e4m3fn).to(tensor.dtype) for tensor in (key, value))
        type(impl).do_kv_cache_update(impl, layer, *rounded, *cache)

    for module in modules(worker, "impl"):
        module.impl.do_kv_cache_update = partial(update, module.impl)


def raw_logprobs(worker):
    from vllm.v1.sample.sampler import Sampler

    worker.model_runner.sampler.compute_logprobs = Sampler.compute_logprobs


def restored(worker):
    """As the engine was started."""
    attention(worker, "scale", 32**-0.5)
    attention(worker, "sliding_window", -1)
    for module in modules(worker, "impl"):
        vars(module.impl).pop("do_kv_cache_update", None)
    for module in modules(worker, "planted"):
        module.base, module.cos_sin_cache = module.planted, module.cos_sin_cache_before
        del module.planted
    vars(worker.model_runner.sampler).pop("compute_logprobs", None)


def keywords(**named: Any):
    return lambda engine: named


def adapter(engine):
    return {"trainer": {"lora": LORA}, "weight": ScaledAdapter(dict(engine.live.model.named_parameters()))}


PLANTS: dict[str, tuple[str, Any]] = {
    "nothing": ("", keywords()),
    "corrupted tensor": ("weights.differ", keywords(weight=corrupted)),
    "stale weights": ("weights.stale", lambda engine: {"weight": Stale()}),
    "stale head": ("weights.stale", lambda engine: {"weight": Stale("lm_head")}),
    "other temperature": ("sampling.temperature", keywords(request=temperature_of(0.8))),
    "raw logprobs": ("sampling.temperature", lambda engine: inside(raw_logprobs)(engine) | {"temperature": 0.7}),
    "start of sequence": ("inputs.special_tokens", keywords(request=prompt_of(lambda ids: [2, *ids]))),
    "truncated prompt": ("inputs.truncation", keywords(request=prompt_of(lambda ids: ids[-20:]))),
    "rope base": ("model.rope", inside(rope)),
    "attention scale": ("model.attention_scale", inside(scale)),
    "window": ("model.sliding_window", inside(window)),
    "fp8 keys": ("arithmetic.kv_dtype", inside(fp8_keys)),
    "adapter twice": ("model.lora_scale", adapter),
    "adapter not merged": ("model.lora_merge", keywords(trainer={"lora": LORA})),
    "both in bf16": ("", keywords(engine={"dtype": "bf16"}, trainer={"dtype": "bf16"})),
    "dtype": ("arithmetic.dtype", keywords(engine={"dtype": "bf16"})),
}


SLOW = {
    "rope base",
    "attention scale",
    "window",
    "fp8 keys",
    "adapter twice",
    "adapter not merged",
    "both in bf16",
    "dtype",
}
"""Plants for which many values are searched: vLLM returns no activations."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow(ci=True)] if case in SLOW else []) for case in PLANTS]
)
def test_planted_cause_in_vllm_is_the_first(engine, monkeypatch, case):
    expected, plant = PLANTS[case]
    train_adapters(monkeypatch)
    if case == "adapter not merged":
        export_base(monkeypatch)
    try:
        diagnosis = engine.diagnose(**plant(engine))
    finally:
        engine.live.run(engine.live.strategy._ready.collective_rpc(restored))
    assert first(diagnosis) == expected, diagnosis
    if expected and not expected.startswith("weights") and expected not in ("arithmetic.dtype", "model.lora_merge"):
        assert diagnosis.not_examined


def test_stale_cache_in_vllm_is_named(engine, monkeypatch):
    """Only the first update clears the cache."""
    vllm = engine.live.strategy._ready
    pause = vllm.pause_generation
    monkeypatch.setattr(
        vllm, "pause_generation", lambda **named: pause(**{**named, "clear_cache": engine.num_updates < 2})
    )
    assert first(engine.diagnose()) == "engine.stale_cache"


def test_both_of_two_causes_in_vllm_are_named(engine):
    hotter, shorter = temperature_of(0.8), prompt_of(lambda ids: ids[-20:])
    causes = engine.diagnose(request=lambda request: hotter(shorter(request))).causes
    assert {cause.name for cause in causes} == {"sampling.temperature", "inputs.truncation"}


@pytest.mark.parametrize("clears", [True, False])
def test_update_in_flight_shows_in_records_of_vllm(engine, monkeypatch, clears):
    """vLLM prefills running requests again if it clears its cache. The last tests: the trainer's weights change."""
    vllm = engine.live.strategy._ready
    pause = vllm.pause_generation
    monkeypatch.setattr(vllm, "pause_generation", lambda **named: pause(**{**named, "clear_cache": clears}))
    names = {cause.name for cause in engine.updated_in_flight().causes}
    assert names == ({"versions.stale"} if clears else {"versions.stale", "versions.stale_kv"})
