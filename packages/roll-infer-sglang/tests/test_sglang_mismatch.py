"""Causes planted around and into a real SGLang engine: `roll-core doctor mismatch` names each first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang_on_a_cpu import ON_A_CPU, stood_in

from roll_testing.infer.models import SMALL
from roll_testing.models import write_checkpoint
from shared_tests.live_engine import Live
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

pytestmark = [pytest.mark.engine("sglang"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """One engine for all plants. `fault` is the file with the name of a fault, see `cpu/attention_faults.py`."""
    from roll_infer_sglang.config import SglangConfig
    from roll_infer_sglang.strategy import SglangStrategy

    folder = tmp_path_factory.mktemp("mismatch")
    fault = folder / "fault"
    fault.write_text("", encoding="utf-8")
    spec = write_checkpoint(folder / "model", {**SMALL, "bos_token_id": 2}, task="causal_lm", vocab_size=64)
    with stood_in(SGLANG_TEST_ATTENTION=str(fault)):
        live = Live(SglangStrategy(SglangConfig.model_validate(ON_A_CPU)), spec)
        yield SimpleNamespace(engine=Mismatched(live, "sglang", ON_A_CPU), fault=fault)
        live.close()


@pytest.fixture
def engine(started):
    """The engine without a fault."""
    started.fault.write_text("", encoding="utf-8")
    return started.engine


def keywords(**named: Any):
    return lambda engine: named


def adapter(engine):
    return {"trainer": {"lora": LORA}, "weight": ScaledAdapter(dict(engine.live.model.named_parameters()))}


PLANTS: dict[str, tuple[str, str, Any]] = {
    "nothing": ("", "", keywords()),
    "corrupted tensor": ("weights.differ", "", keywords(weight=corrupted)),
    "stale weights": ("weights.stale", "", lambda engine: {"weight": Stale()}),
    "stale head": ("weights.stale", "", lambda engine: {"weight": Stale("lm_head")}),
    "other temperature": ("sampling.temperature", "", keywords(request=temperature_of(0.8))),
    "start of sequence": ("inputs.special_tokens", "", keywords(request=prompt_of(lambda ids: [2, *ids]))),
    "truncated prompt": ("inputs.truncation", "", keywords(request=prompt_of(lambda ids: ids[-20:]))),
    "adapter twice": ("model.lora_scale", "", adapter),
    "attention scale": ("model.attention_scale", "scale", keywords()),
    "window": ("model.sliding_window", "window", keywords()),
    "fp8 keys": ("arithmetic.kv_dtype", "float8_e4m3fn", keywords()),
    "bf16 keys": ("arithmetic.kv_dtype", "bfloat16", keywords()),
    "adapter not merged": ("model.lora_merge", "", keywords(trainer={"lora": LORA})),
    "both in bf16": ("", "", keywords(engine={"dtype": "bf16"}, trainer={"dtype": "bf16"})),
    "dtype": ("arithmetic.dtype", "", keywords(engine={"dtype": "bf16"})),
}
SLOW = {
    "corrupted tensor",
    "adapter twice",
    "adapter not merged",
    "both in bf16",
    "attention scale",
    "window",
    "fp8 keys",
    "bf16 keys",
    "dtype",
}
"""Plants for which many values are searched: SGLang returns no activations."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow(ci=True)] if case in SLOW else []) for case in PLANTS]
)
def test_planted_cause_in_sglang_is_the_first(engine, started, monkeypatch, case):
    expected, fault, plant = PLANTS[case]
    train_adapters(monkeypatch)
    if case == "adapter not merged":
        export_base(monkeypatch)
    started.fault.write_text(fault, encoding="utf-8")
    diagnosis = engine.diagnose(**plant(engine))
    assert first(diagnosis) == expected, diagnosis


def test_stale_cache_in_sglang_is_named(engine, monkeypatch):
    """Only the first update clears the cache."""
    request = engine.live.strategy._ready.request

    async def without_flush(path, *arguments, **named):
        skipped = path.startswith("/flush_cache") and engine.num_updates > 1
        return None if skipped else await request(path, *arguments, **named)

    monkeypatch.setattr(engine.live.strategy._ready, "request", without_flush)
    assert first(engine.diagnose()) == "engine.stale_cache"


def test_both_of_two_causes_in_sglang_are_named(engine):
    hotter, shorter = temperature_of(0.8), prompt_of(lambda ids: ids[-20:])
    causes = engine.diagnose(request=lambda request: hotter(shorter(request))).causes
    assert {cause.name for cause in causes} == {"sampling.temperature", "inputs.truncation"}


def test_update_in_flight_leaves_no_stale_keys_in_sglang(engine):
    """Requests are prefilled again, so that only older tokens differ. The last test: the trainer's weights change."""
    assert {cause.name for cause in engine.updated_in_flight().causes} == {"versions.stale"}
