"""Whole runs: an environment of this package and a class of the user, from the config to metrics."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_core.config import load
from roll_core.errors import EnvironmentsFailedError
from roll_core.plugins.registry import load_registry
from roll_core.runtime.records.console import Console
from roll_core.runtime.run.loop import RunResult, execute
from roll_testing.errors import check_error
from roll_testing.runs import TINY


def run(folder: Path, environment: dict[str, Any], **given: Any) -> RunResult:
    config = {
        "pipeline": "agentic",
        "exp_name": "environments",
        "output_dir": str(folder / "output"),
        "executor": "local",
        "prompt_length": 320,
        "response_length": 320,
        "track_with": [],
        "save_steps": 0,
        "eval_steps": 0,
        "tokenizer": {"kind": "byte"},
        "max_steps": 1,
        "rollout_batch_size": 4,
        "max_actions_per_traj": 2,
        "max_tokens_per_step": 3,
        "custom_envs": {"env": environment},
        "train_env_manager": {"group_size": 2},
        "actor_train": {
            "model_args": {
                "dtype": "fp32",
                "disable_gradient_checkpointing": True,
                "random_init": TINY | {"max_position_embeddings": 1024},
            },
            "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 4},
            "data_args": {"template": "plain"},
            "strategy_args": {"strategy_name": "hf_train"},
            "device_mapping": [0],
        },
        "actor_infer": {
            "model_args": {"dtype": "fp32"},
            "strategy_args": {"strategy_name": "hf_infer"},
            "device_mapping": [0],
        },
    } | given
    path = folder / "environments.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    registry = load_registry()
    return execute(load(path, [], registry), registry, console=Console(stream=io.StringIO(), terminal=False))


def metrics(result: RunResult) -> dict[str, float]:
    if result.error is not None:
        raise result.error
    found: dict[str, float] = json.loads(result.run_dir.metrics.read_text(encoding="utf-8").splitlines()[-1])
    return found


def test_the_text_game_is_trained_on(tmp_path: Path) -> None:
    line = metrics(run(tmp_path, {"environment": "text_game", "env_config": {"rooms": 3}}))
    assert line["env/env/turns/mean"] == 2
    assert line["env/env/truncated_share"] == 1
    assert 0 <= line["env/env/valid"] <= 1


@pytest.mark.engine("gymnasium")
def test_a_gymnasium_environment_is_trained_on(tmp_path: Path) -> None:
    line = metrics(run(tmp_path, {"environment": "gymnasium", "env_config": {"id": "FrozenLake-v1"}}))
    assert line["env/env/turns/mean"] == 2


LINES = """
class Lines:
    def __init__(self, fails=False):
        self.fails = fails

    def reset(self, seed=None):
        return f"write {seed % 10}", {}

    def step(self, action):
        if self.fails:
            raise ValueError("no such level")
        return "", float(len(action)), True, False, {}
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_class_of_the_user_runs_in_a_process_and_its_failure_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    (tmp_path / "my_lines.py").write_text(LINES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    options = {"make": "my_lines:Lines", "options": {"fails": fails}}
    entry = {"environment": "gymnasium", "env_config": options, "concurrency": 1, "max_retries": 0}
    result = run(tmp_path, entry, max_consecutive_failures=1)
    if not fails:
        assert metrics(result)["env/env/turns/mean"] == 1
        return
    assert isinstance(result.error, EnvironmentsFailedError)
    check_error(result.error, EnvironmentsFailedError, "roll-environments", "my_lines:Lines", "step", "ValueError")
