"""Runs of pipeline `agentic` in an environment, from the config to metrics."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import yaml

from roll_core.config import load
from roll_core.plugins.registry import load_registry
from roll_core.runtime.records.console import Console
from roll_core.runtime.run.loop import RunResult, execute
from roll_testing.runs import TINY


def run(folder: Path, environment: dict[str, Any], **given: Any) -> RunResult:
    """Run a config. Dotted keys in `given` are overrides."""
    changes = [f"{key}={given.pop(key)}" for key in list(given) if "." in key]
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
    return execute(load(path, changes, registry), registry, console=Console(stream=io.StringIO(), terminal=False))


def metrics(result: RunResult) -> dict[str, float]:
    if result.error is not None:
        raise result.error
    found: dict[str, float] = json.loads(result.run_dir.metrics.read_text(encoding="utf-8").splitlines()[-1])
    return found
