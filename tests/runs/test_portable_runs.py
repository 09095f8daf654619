"""Runs that go on under another strategy, through the state that all strategies read."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from safetensors.torch import load_file

from roll_core.errors import CheckpointMismatchError, ConfigError
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.manifest import verify
from roll_core.spec.providers import TrainCapabilities
from roll_testing.errors import mentions, raises_error

CLOCKS = ("time", "tokens_per_s")
ROUNDING = 2e-5
"""Relative, of metrics: strategies add up in different orders."""
WHOLE = {}
TIED = {"tie_word_embeddings": True}
ADAPTERS = {"lora_target": "all-linear", "lora_rank": 4, "additional_target": "lm_head"}

IN_4_BITS = {"lora_target": "all-linear", "lora_rank": 4, "load_in_4bit": True}


def sft(runs, strategy, ranks=1, model=WHOLE, **given):
    """Six steps with a schedule and decay, of the same batches on any number of ranks."""
    config = runs.sft(**{"max_steps": 6, "save_steps": 2, "portable_checkpoints": True, **given})
    role = config["sft_train"]
    role["strategy_args"] = {"strategy_name": strategy}
    role["device_mapping"] = list(range(ranks))
    role["training_args"] |= {
        "per_device_train_batch_size": 16 // ranks,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
    }
    if model is TIED:
        role["model_args"]["random_init"] = role["model_args"]["random_init"] | TIED
    else:
        role["model_args"] |= model
    return config


def at(result, step):
    (found,) = [each.path for each in CheckpointDirectory(result.run_dir.checkpoints).list() if each.step == step]
    return found


def chain(runs, places, model=WHOLE):
    """Two steps on each place, as (strategy, ranks); the whole run on the first of them, and the last of the chain."""
    whole = last = None
    for number, (strategy, ranks) in enumerate(places):
        resume = {"resume_from_checkpoint": str(at(last, 2 * number))} if last else {}
        last = runs.ok(sft(runs, strategy, ranks, model, exp_name=f"part-{number}", **resume))
        whole = whole or last
    return whole, last


def check_same_run(runs, found, expected):
    for one, other in zip(runs.metrics(found), runs.metrics(expected), strict=True):
        numbers = {name: value for name, value in other.items() if not name.startswith(CLOCKS)}
        assert {name: one[name] for name in numbers} == pytest.approx(numbers, rel=ROUNDING)
    weights, others = (load_file(each.run_dir.export / "model.safetensors") for each in (found, expected))
    assert weights.keys() == others.keys()
    missed = sum(float((weights[name] - other).square().sum()) for name, other in others.items())
    assert math.sqrt(missed / sum(float(other.square().sum()) for other in others.values())) < ROUNDING


def log_of(result):
    return result.run_dir.log.read_text(encoding="utf-8")


@pytest.mark.parametrize("model", [WHOLE, TIED, ADAPTERS, IN_4_BITS], ids=["whole", "tied", "adapters", "4 bits"])
def test_hf_then_fsdp2_then_hf_is_one_run(local_runs, model):
    whole, last = chain(local_runs, [("hf_train", 1), ("fsdp2_train", 1), ("hf_train", 1)], model)
    check_same_run(local_runs, last, whole)
    assert "sft_train: hf_train × 1 loads the portable state of fsdp2_train × 1" in log_of(last)


def test_run_moves_to_two_ranks_and_back_unchanged(ray_runs):
    whole, last = chain(ray_runs, [("hf_train", 2), ("fsdp2_train", 2), ("hf_train", 1)])
    check_same_run(ray_runs, last, whole)


def test_strategy_loads_its_own_state_format(local_runs):
    _, last = chain(local_runs, [("hf_train", 1), ("hf_train", 1)])
    assert "loads the portable state of" not in log_of(last)


def test_checkpoint_without_portable_state_names_the_remedy(local_runs):
    saved = local_runs.ok(sft(local_runs, "hf_train", portable_checkpoints=False))
    other = sft(local_runs, "fsdp2_train", resume_from_checkpoint=str(at(saved, 2)))
    result = local_runs.run(other)
    assert isinstance(result.error, CheckpointMismatchError)
    assert result.error.exit_code == 2
    for part in ("fsdp2_train", "sft_train.strategy_args.strategy_name=hf_train", "portable_checkpoints=true"):
        assert part in str(result.error)


def test_another_model_is_refused_by_name(local_runs):
    saved = local_runs.ok(sft(local_runs, "hf_train", max_steps=2))
    other = sft(local_runs, "fsdp2_train", model=TIED, resume_from_checkpoint=str(at(saved, 2)))
    result = local_runs.run(other)
    assert mentions(str(result.error), "tie_word_embeddings", "sft_train")


def test_adapters_on_another_base_model_are_refused(local_runs):
    saved = local_runs.ok(sft(local_runs, "hf_train", max_steps=2, model=ADAPTERS))
    other = sft(local_runs, "fsdp2_train", model=ADAPTERS, seed=4, resume_from_checkpoint=str(at(saved, 2)))
    result = local_runs.run(other)
    assert mentions(str(result.error), "base")


def test_a_flipped_byte_of_the_state_is_found_before_it_is_used(local_runs):
    saved = local_runs.ok(sft(local_runs, "hf_train"))
    file = at(saved, 6) / "sft_train" / "portable" / "state-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    (problem,) = verify(at(saved, 6))
    assert "portable/state-00001.safetensors does not have the digest" in problem
    result = local_runs.ok(sft(local_runs, "fsdp2_train", resume_from_checkpoint=True))
    assert json.loads(result.run_dir.record.read_text(encoding="utf-8"))["resumed_step"] == 4


def test_strategy_without_exportable_state_is_refused_early(local_runs, monkeypatch):
    from roll_core.plugins.registry import load_registry
    from roll_strategy_hf import plugin

    unable = dataclasses.replace(plugin.HF_TRAIN, capabilities=TrainCapabilities(tasks=("causal_lm",)))
    monkeypatch.setattr(plugin, "HF_TRAIN", unable)
    local_runs.registry = load_registry()
    with raises_error(ConfigError, "hf_train"):
        local_runs.run(sft(local_runs, "hf_train"))
