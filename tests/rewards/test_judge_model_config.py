"""Configs of judges that are roles: mistakes that `check` finds, and the role's memory in a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_core.api.files import FileCheck
from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.plugins.registry import load_registry
from roll_core.spec.config import RunConfig
from roll_tools.planning import make_plan
from shared_tests.reward_roles import LAYER, MODEL, run_with

JUDGE = MODEL | {"num_hidden_layers": 3, "architectures": ["Qwen3ForCausalLM"]}
RUN = run_with("judge_model", "judge")
AT = "rewards.style"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory in which `RUN` is good."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n', encoding="utf-8")
    Path("judge").mkdir()
    Path("judge/config.json").write_text(json.dumps(JUDGE), encoding="utf-8")
    Path("judge/tokenizer.json").write_text("{}", encoding="utf-8")
    Path("judge/tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}', encoding="utf-8")


def loaded(text, registry=None):
    Path("run.yaml").write_text(text, encoding="utf-8")
    return load(Path("run.yaml"), (), registry or load_registry(), FileCheck())


def problems(text):
    """(line, key, code) of each mistake."""
    with pytest.raises(ConfigError) as raised:
        loaded(text)
    assert raised.value.exit_code == 2
    return [(int(each.where.split(":")[1]), each.key, each.code) for each in raised.value.problems]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("    strategy_args: {strategy_name: hf_infer}\n    device_mapping: [0]\n", "    device_mapping: [0]\n",
         (18, f"{AT}.strategy_args", "ROLL-C011")),
        ("strategy_name: hf_infer}\n    device", "strategy_name: hf_inferr}\n    device",
         (21, f"{AT}.strategy_args.strategy_name", "ROLL-P004")),
        ("strategy_name: hf_infer}\n    device", "strategy_name: hf_train}\n    device",
         (21, f"{AT}.strategy_args.strategy_name", "ROLL-C017")),
        ("reward: judge_model", "reward: judge_model\n    max_retries: 0", (20, f"{AT}.max_retries", "ROLL-C014")),
        ("reward: judge_model", "reward: judge_model\n    timeout_s: 60", (20, f"{AT}.timeout_s", "ROLL-C014")),
        ("reward: judge_model", "reward: judge_model\n    num_votes: 3", (20, AT, "ROLL-C014")),
        ("reward: judge_model", "reward: judge_model\n    judge_prompt: good?", (20, AT, "ROLL-C014")),
        ("reward: judge_model", "reward: judge_model\n    generating_args: {top_p: 0.9}", (20, AT, "ROLL-C014")),
        ("reward: judge_model", "reward: judge_model\n    judge_api_url: http://x",
         (20, f"{AT}.judge_api_url", "ROLL-C010")),
        ("reward: judge_model", "reward: judge_model\n    ground_truth: answer",
         (20, f"{AT}.ground_truth", "ROLL-C041")),
        ("model_name_or_path: judge", "model_name_or_path: ./gone",
         (20, f"{AT}.model_args.model_name_or_path", "ROLL-C040")),
    ],
)  # fmt: skip
def test_a_mistake_in_a_judge_is_located(old, new, found):
    assert old in RUN
    assert problems(RUN.replace(old, new, 1)) == [found]


@pytest.mark.parametrize("own", [True, False], ids=["own model", "pretrain"])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_judge_without_tokenizer_or_chat_template_is_refused(own, file):
    Path("judge/tokenizer_config.json").write_text("{}", encoding="utf-8")
    if file == "tokenizer.json":
        Path("judge/tokenizer.json").unlink()
        Path("judge/tokenizer_config.json").unlink()
    run = RUN if own else "pretrain: judge\n" + RUN.replace(", model_name_or_path: judge", "")
    key = f"{AT}.model_args.model_name_or_path" if own else "pretrain"
    assert problems(run) == [(20 if own else 1, key, "ROLL-C041")]


def test_a_template_in_a_file_of_its_own_is_found():
    Path("judge/tokenizer_config.json").write_text("{}", encoding="utf-8")
    Path("judge/chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert loaded(RUN).config.roles()[AT].kind == "generate"


def test_the_saved_config_is_valid_again():
    config = loaded(RUN).config
    assert isinstance(config, RunConfig)
    role = config.roles()[AT]
    assert type(role).model_validate(role.model_dump(mode="json")) == role


@pytest.mark.parametrize("votes", [1, 3])
def test_plan_counts_the_judge_beside_the_engine_in_rollouts(votes):
    keys = f"reward: judge_model\n    max_tokens: 100\n    temperature: 1\n    num_votes: {votes}"
    plan = make_plan(loaded(RUN.replace("reward: judge_model", keys)), load_registry(), host_bytes=2**34)
    (memory,) = [each for each in plan.memory if each.role == AT]
    assert not memory.unknown
    assert memory.parameters == 1000 * 64 + 3 * LAYER + 64
    cache = sum(use.num_bytes for use in memory.taken("generate") if use.what == "kv cache")
    # Keys and values of 3 layers × 2 heads × 16, fp32. Each vote has 24 + 40 + 100 positions, in blocks of 16.
    assert cache == (64 * votes * 176 + min(8192, 64 * votes * (24 + 40))) * 2 * 3 * 2 * 16 * 4
    rollout = next(load for load in plan.loads if load.phase == "rollout")
    assert {AT, "actor_infer"} <= dict(rollout.by_role).keys()
    assert not memory.offloads
