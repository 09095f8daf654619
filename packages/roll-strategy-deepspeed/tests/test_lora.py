"""Adapters where ZeRO shards them and their base model."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from deepspeed_programs import export_both_ways, hold
from safetensors import safe_open

from roll_core.spec.model import LoraSpec
from roll_core.spec.train import WantedOutputs
from roll_testing.bench import Step
from roll_testing.bounds import check_near, check_same
from roll_testing.errors import mentions
from roll_testing.losses import LOSSES, SPLITS
from roll_testing.models import make_batch
from roll_testing.programs import export_after_steps, load_damaged, resume, save_between, train

LORA = LoraSpec(targets=("all-linear",), rank=4, alpha=8.0)
BATCH = make_batch(61)
STEPS = [
    Step(sequences=make_batch(61, seed=seed), loss=LOSSES["sft"], split=SPLITS["three at a time"]) for seed in range(4)
]


@pytest.fixture
def adapted(case):
    def made(stage, world_size=1, dtype="fp32", **lora):
        model = replace(case.model, dtype=dtype, lora=replace(LORA, **lora))
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        return case.with_(model=model, strategy_config={"zero_optimization": zero}, world_size=world_size)

    return made


def test_adapter_state_resumes_at_another_stage_and_size(ranks, adapted, tmp_path):
    straight = ranks(save_between, adapted(3, world_size=2), STEPS, 2, str(tmp_path))[0]
    resumed = ranks(resume, adapted(1), STEPS[:1], STEPS[2:], str(tmp_path))[0]
    check_same("merged weights as loaded", resumed.before, straight.before)
    check_near("merged weights", resumed.after, straight.after, 1e-5)
    state = json.loads((tmp_path / "rank-0" / "state.json").read_text())
    assert all(".lora_A." in name or ".lora_B." in name for name in state["parameters"])
    shards = sorted((tmp_path / "rank-0").glob("state-*.safetensors"))
    with safe_open(shards[0], framework="pt") as first, safe_open(shards[1], framework="pt") as second:
        assert not set(first.keys()) & set(second.keys())


def test_state_of_other_adapters_or_a_full_model_is_refused(ranks, adapted, case, tmp_path):
    ranks(save_between, adapted(3), STEPS[:1], 1, str(tmp_path))
    folder = str(tmp_path / "rank-0")
    other = ranks(load_damaged, adapted(3, alpha=16.0), folder)[0]
    assert other.kinds[0] == "CheckpointError"
    assert "alpha" in other.message
    whole = ranks(load_damaged, case, folder)[0]
    assert whole.kinds[0] == "CheckpointError"
    assert mentions(whole.message, "adapters")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
def test_adapters_are_exported_as_peft_loads_them(ranks, adapted, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    case, want = adapted(3, world_size=2, export="adapter"), WantedOutputs(logprobs=True)
    held, _, error = ranks(export_after_steps, case, STEPS[:2], BATCH, want, str(tmp_path))[0]
    assert error is None
    assert not (tmp_path / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(case.model.path)
    merged = PeftModel.from_pretrained(base, tmp_path).merge_and_unload()
    check_near("merged", {name: each.detach().numpy() for name, each in merged.named_parameters()}, held, 1e-6)


@pytest.mark.parametrize(("stage", "world_size"), [(1, 1), (3, 2)])
def test_exported_adapters_and_base_make_the_merged_weights(ranks, adapted, stage, world_size):
    for beneath, merged, alone in ranks(export_both_ways, adapted(stage, world_size), STEPS[:2]):
        layers = {each.rpartition(".lora_")[0] for each in alone}
        assert set(alone) == {f"{layer}.lora_{side}.weight" for layer in layers for side in "AB"}
        assert {each for each in merged if not np.array_equal(merged[each], beneath[each])} == {
            f"{layer}.weight" for layer in layers
        }
        for layer in layers:
            a_RI, b_OR = (alone[f"{layer}.lora_{side}.weight"] for side in "AB")
            np.testing.assert_allclose(merged[f"{layer}.weight"], beneath[f"{layer}.weight"] + b_OR @ a_RI, atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        {"use_dora": True},
        {"targets": ("embed_tokens", "q_proj"), "rank_pattern": {"q_proj": 2}, "use_rslora": True},
    ],
    ids=["DoRA", "embeddings and ranks"],
)
def test_other_adapters_train_at_stage_3_as_at_stage_0(ranks, adapted, kind):
    whole, sharded = (ranks(train, adapted(stage, **kind), STEPS)[0] for stage in (0, 3))
    check_near("merged weights", sharded.after, whole.after, 1e-5)
    assert any(not np.array_equal(each, whole.before[name]) for name, each in whole.after.items())


def test_only_adapters_have_gradients_and_moments(ranks, adapted, case):
    adapters, whole = (ranks(hold, each, STEPS[0])[0] for each in (adapted(2), case))
    assert adapters["optimizer"] < whole["optimizer"] / 2
    assert adapters["grads"] < whole["grads"] / 2


@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_of_bf16_models_train_as_in_float32(ranks, adapted, stage):
    rounded, exact = (ranks(train, adapted(stage, dtype=dtype), STEPS)[0] for dtype in ("bf16", "fp32"))
    assert any(not np.array_equal(each, rounded.before[name]) for name, each in rounded.after.items())
    for one, other in zip(rounded.stats, exact.stats, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=0.1)
