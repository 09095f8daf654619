"""Rewards in whole runs: config, check, records of samples, doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from roll_core.api.files import FileCheck
from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.plugins.registry import load_registry
from roll_core.spec.diagnostics import CheckContext
from roll_core.spec.providers import RewardProvider
from roll_rewards import checks, sandbox
from roll_rewards.composite import CLASSES
from roll_testing.errors import mentions
from roll_testing.runs import TINY, Runs
from shared_tests.runs import REWARDS

NEEDS_ISOLATION = pytest.mark.skipif(bool(sandbox.probe()), reason=f"no isolation on this host: {sandbox.probe()}")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    (tmp_path / "rollrewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = Runs(tmp_path, "local")
    for name in ("train", "val"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        tests = [{"input": "", "output": "7"}, {"fn_name": "f", "input": "1", "output": "1"}]
        text = "".join(json.dumps(row | {"test_cases": json.dumps(tests)}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return found


REPEATED = {"reward": "repetition_penalty", "ngram_size": 1}
CODE = {"reward": "code", "require_code_block": False, "reward_type": "soft", "case_timeout_s": 1, "processes": 2}


@NEEDS_ISOLATION
def test_a_run_trains_on_programs_and_records_the_components(runs):
    components = {
        "code": CODE | {"weight": 2.0},
        "digits": {"reward": "function", "function": "rollrewards:share_of_digits"},
    }
    config = runs.rlvr(max_steps=1, rewards={"code": {"reward": "composite", "components": components}})
    result = runs.ok(config)
    samples = [json.loads(line) for line in next(result.run_dir.path.rglob("samples*.jsonl")).read_text().splitlines()]
    details = [each["detail"] for each in samples]
    assert details
    assert all(each["code"] == 0.0 and each["digits"] > 0 for each in details)


@NEEDS_ISOLATION
def test_a_run_with_code_alone_scores_every_sample(runs):
    (metrics,) = runs.metrics(runs.ok(runs.rlvr(max_steps=1, rewards={"code": CODE}, guards={"zero_gradient": "off"})))
    assert metrics["reward/failures"] == 0.0
    assert metrics["score/mean"] == 0.0


def test_function_that_cannot_be_imported_is_a_config_mistake(runs):
    result = runs.run(runs.rlvr(rewards={"missing": {"reward": "function", "function": "no_such_module:score"}}))
    assert isinstance(result.error, ConfigError)
    assert mentions(str(result.error), "ROLL-C041", "function", "no_such_module:score")
    assert "advice" not in json.loads(result.run_dir.record.read_text(encoding="utf-8"))["error"]


@pytest.mark.slow(ci=True)
@NEEDS_ISOLATION
def test_programs_score_the_episodes_of_an_agentic_run(runs):
    reward = {"reward": "composite", "components": {"code": CODE, "repeated": REPEATED}}
    config = runs.base("agentic") | {
        "max_steps": 1,
        "prompt_length": 64,
        "response_length": 64,
        "tokenizer": {"kind": "char", "alphabet": "0123456789>. abcdefghijklmnopqrstuvwxyzNT\n"},
        "rollout_batch_size": 8,
        "max_actions_per_traj": 4,
        "max_tokens_per_step": 4,
        "train_env_manager": {"group_size": 2},
        "custom_envs": {
            "code": {
                "environment": "rewarded_task",
                "env_config": {"reward": reward, "max_attempts": 2, "feedback": "no"},
                "data_args": {"file_name": str(runs.folder / "train.jsonl")},
            }
        },
        "guards": {"zero_gradient": "off"},
    }
    rlvr = runs.rlvr()
    config |= {"actor_train": rlvr["actor_train"], "actor_infer": rlvr["actor_infer"]}
    config["actor_train"]["data_args"] = {"template": "plain"}
    config["actor_train"]["model_args"]["random_init"] = TINY | {"max_position_embeddings": 256}
    result = runs.ok(config)
    (metrics,) = runs.metrics(result)
    assert metrics["env/code/turns/mean"] == 2.0
    assert metrics["env/code/full_marks"] == 0.0
    samples = [json.loads(line) for line in next(result.run_dir.path.rglob("samples*.jsonl")).read_text().splitlines()]
    assert all(each["detail"]["code"] == 0.0 for each in samples)


def load_config(runs, **given):
    path = runs.folder / "config.yaml"
    path.write_text(yaml.safe_dump(runs.rlvr(**given)), encoding="utf-8")
    return path, lambda: load(path, [], runs.registry)


def test_mistakes_are_located_at_their_keys(runs):
    rewards = {
        "a": {"reward": "composite", "components": {"f": {"reward": "format", "format_pattern": "("}}},
        "b": {"reward": "code", "language": "rust"},
    }
    _, loading = load_config(runs, rewards=rewards)
    with pytest.raises(ConfigError) as caught:
        loading()
    assert {each.key for each in caught.value.problems} == {
        "rewards.a.components.f.format_pattern",
        "rewards.b.language",
    }


def test_check_reports_a_host_without_isolation_at_its_key(runs, monkeypatch):
    monkeypatch.setattr(sandbox, "probe", lambda: "landlock (Function not implemented)")
    path, _ = load_config(runs, rewards={"code": {"reward": "code"}})
    with pytest.raises(ConfigError) as caught:
        load(path, [], runs.registry, FileCheck())
    # The hint about imported code belongs to `function`.
    assert [(each.key, each.hint) for each in caught.value.problems] == [("rewards.code.sandbox_command", "")]


def test_check_reports_rows_with_malformed_tests_at_the_column(runs):
    rows = [{"prompt": "1", "test_cases": [{"input": "1", "output": "1"}]}, {"prompt": "2", "test_cases": [7]}] * 2
    data = runs.folder / "malformed.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path, _ = load_config(runs, rewards={"code": {"reward": "code", "accept_missing_isolation": True}})
    with pytest.raises(ConfigError) as caught:
        load(path, [f"actor_train.data_args.file_name={data}"], runs.registry, FileCheck())
    assert [(each.key, each.code) for each in caught.value.problems] == [("rewards.code.test_cases", "ROLL-C041")]
    assert "malformed.jsonl row 2" in caught.value.problems[0].message


def test_every_reward_but_the_combination_is_a_component():
    registry = load_registry()
    names = {
        each
        for each in registry.names(RewardProvider)
        if "roll-rewards" in registry.owner(registry.find(RewardProvider, each))
    }
    # A judge of the run is a role of its own.
    assert names == set(CLASSES) | {"composite", "judge_model"}


def test_the_doctor_reports_the_layers_or_what_is_missing(monkeypatch):
    if not sandbox.probe():
        (found,) = checks.sandbox(CheckContext(platform=None))
        assert found.level in ("ok", "note")
        assert "seccomp" in found.found
    monkeypatch.setattr(sandbox, "probe", lambda: "no")
    (refused,) = checks.sandbox(CheckContext(platform=None))
    assert (refused.level, refused.found) == ("note", "no")
