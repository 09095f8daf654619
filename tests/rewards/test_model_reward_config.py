"""Configs of reward models: mistakes that `check` finds, and the role's memory in a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_core.api.files import FileCheck
from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.plugins.registry import Registry, load_registry
from roll_core.spec.config import RunConfig
from roll_tools.planning import make_plan
from shared_tests.hf_plugins import hf_plugins
from shared_tests.reward_roles import LAYER, MODEL, run_with

LAYERS = 2 * LAYER
RUN = run_with("model", "rm")
AT = "rewards.style"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory in which `RUN` is good."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1+1="}\n', encoding="utf-8")
    write_model(architectures=["Qwen3ForSequenceClassification"], id2label={"0": "LABEL_0"})


def write_model(**keys):
    Path("rm").mkdir(exist_ok=True)
    Path("rm/config.json").write_text(json.dumps(MODEL | keys), encoding="utf-8")


def problems(text, *overrides):
    """(line, key, code) of each mistake."""
    Path("run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load(Path("run.yaml"), overrides, Registry(hf_plugins()), FileCheck())
    assert raised.value.exit_code == 2
    return [(int(each.where.split(":")[1]), each.key, each.code) for each in raised.value.problems]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("    strategy_args: {strategy_name: hf_infer}\n    device", "    device",
         (18, f"{AT}.strategy_args", "ROLL-C011")),
        ("strategy_name: hf_infer}\n    device", "strategy_name: hf_inferr}\n    device",
         (21, f"{AT}.strategy_args.strategy_name", "ROLL-P004")),
        (", model_name_or_path: rm", "", (20, AT, "ROLL-C014")),
        ("reward: model", "reward: model\n    timeout_s: 20", (20, f"{AT}.timeout_s", "ROLL-C014")),
        ("reward: model", "reward: model\n    max_retries: 0", (20, f"{AT}.max_retries", "ROLL-C014")),
        ("reward: model", "reward: model\n    input: words", (20, f"{AT}.input", "ROLL-C013")),
        ("reward: model", "reward: model\n    judge: x", (20, f"{AT}.judge", "ROLL-C010")),
        ("model_name_or_path: rm", "random_init: {model_type: qwen3}}\n    input: text\n    system_envs: {",
         (21, AT, "ROLL-C014")),
        ("model_name_or_path: rm", "model_name_or_path: ./gone",
         (20, f"{AT}.model_args.model_name_or_path", "ROLL-C040")),
        ("{dtype: fp32, model_name_or_path: rm}", "{dtype: fp32, model_name_or_path: rm, lora_target: all-linear}",
         (20, f"{AT}", "ROLL-C014")),
    ],
)  # fmt: skip
def test_a_mistake_in_a_reward_model_is_located(old, new, found):
    assert old in RUN
    assert problems(RUN.replace(old, new, 1)) == [found]


@pytest.mark.parametrize(
    "keys",
    [
        {"architectures": ["Qwen3ForCausalLM"]},
        {"architectures": ["Qwen3ForSequenceClassification"]},  # two labels, the default of transformers
        {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}},
    ],
)
def test_a_model_without_one_score_is_found_before_it_is_loaded(keys):
    write_model(**keys)
    assert problems(RUN) == [(20, f"{AT}.model_args.model_name_or_path", "ROLL-C041")]


def test_rule_reward_refuses_a_strategy():
    assert (18, "rewards.style.strategy_args", "ROLL-C017") in [
        (each[0] - 3, *each[1:]) for each in problems(RUN.replace("reward: model", "reward: math_rule"))
    ]


def test_the_saved_config_is_valid_again():
    Path("run.yaml").write_text(RUN, encoding="utf-8")
    config = load(Path("run.yaml"), (), Registry(hf_plugins()), FileCheck()).config
    assert isinstance(config, RunConfig)
    role = config.roles()[AT]
    assert role.kind == "score"
    assert type(role).model_validate(role.model_dump(mode="json")) == role


def test_plan_counts_the_reward_model_beside_the_engine():
    Path("run.yaml").write_text(RUN, encoding="utf-8")
    plan = make_plan(load(Path("run.yaml"), (), load_registry()), load_registry(), host_bytes=2**34)
    (memory,) = [each for each in plan.memory if each.role == AT]
    assert not memory.unknown
    assert memory.parameters == 1000 * 64 + LAYERS + 64 + 64  # with the last norm and a head of one output
    assert memory.num_bytes("score") > 4 * memory.parameters
    rollout = next(load for load in plan.loads if load.phase == "rollout")
    assert {AT, "actor_infer"} <= dict(rollout.by_role).keys()
