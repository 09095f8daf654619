"""`enable_lora` in a run's config: who is sent adapters, and what is refused before anything starts. Without vLLM."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.plugins.registry import Registry, load_registry
from roll_core.runtime.workers.build import model_spec, served_adapters
from roll_core.spec.pipeline import RoleSpec
from roll_core.spec.providers import TrainProvider
from roll_testing.errors import raises_error

INFER = RoleSpec(name="actor_infer", kind="generate", model_from="actor_train")
LORA = {"lora_target": "all-linear", "lora_rank": 4, "lora_alpha": 12}


@pytest.fixture
def served(tmp_path):
    """`served(model_args, strategy_config, trainer)`: the adapters that `actor_infer` is sent."""
    registry = load_registry()

    def find(model_args, strategy_config, trainer="hf_train"):
        data = {
            "pipeline": "rlvr",
            "max_steps": 1,
            "actor_train": {
                "model_args": {"random_init": {"model_type": "qwen3"}, **model_args},
                "data_args": {"file_name": "rows.jsonl"},
                "strategy_args": {"strategy_name": trainer},
            },
            "actor_infer": {"strategy_args": {"strategy_name": "vllm", "strategy_config": strategy_config}},
            "rewards": {"math": {"reward": "math_rule"}},
        }
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps(data), encoding="utf-8")
        config = load(path, [], registry).config
        assert model_spec(INFER, config, tmp_path).lora is None
        return served_adapters(INFER, config, registry)

    return find


def test_the_trainers_adapter_is_sent_where_it_is_asked_for(served):
    lora = served(LORA, {"enable_lora": True})
    assert (lora.rank, lora.alpha, lora.targets) == (4, 12.0, ("all-linear",))


def test_weights_are_sent_whole_where_nothing_is_said(served):
    assert served(LORA, {}) is None
    assert served({}, {}) is None


def test_adapters_without_a_trainer_are_refused(served):
    with raises_error(ConfigError, "strategy_config"):
        served({}, {"enable_lora": True})


def test_every_trainer_of_adapters_sends_them(served):
    trainers = [
        each for each in load_registry().providers(TrainProvider) if each.capabilities.lora and not each.forward_only
    ]
    assert {"hf_train", "fsdp2_train"} <= {each.name for each in trainers}
    for each in trainers:
        assert served(LORA, {"enable_lora": True}, each.name).rank == 4


def test_adapters_beside_fully_trained_modules_are_refused(served):
    with raises_error("ROLL-C014", "additional_target", key="actor_infer.strategy_args.strategy_config"):
        served({**LORA, "additional_target": ["norm"]}, {"enable_lora": True})


def test_a_trainer_that_only_exports_merged_weights_is_refused(served, monkeypatch):
    def find(registry, kind, name, find=Registry.find):
        found = find(registry, kind, name)
        return (
            replace(found, capabilities=replace(found.capabilities, adapter_export=False))
            if name == "hf_train"
            else found
        )

    monkeypatch.setattr(Registry, "find", find)
    with raises_error("ROLL-C014", "hf_train", key="actor_infer.strategy_args.strategy_config"):
        served(LORA, {"enable_lora": True})
