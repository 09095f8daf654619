"""Whole runs in this process: a one-layer model, one token per character."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from roll_core.config import load
from roll_core.data.tokenizers import make_tokenizer
from roll_core.plugins.registry import load_registry
from roll_core.runtime.records.console import Console
from roll_core.runtime.run.loop import RunResult, execute
from roll_core.spec.config import TokenizerConfig
from roll_testing.runs import TINY

if TYPE_CHECKING:
    from pathlib import Path

MODEL = TINY | {"max_position_embeddings": 256}
ALPHABET = "0123456789 GRabcdefghijklmnopqrstuvwxyz._PO\n,?"


class AgenticRuns:
    """A directory with configs and their runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.registry = folder, load_registry()

    def config(self, **given: Any) -> dict[str, Any]:
        return {
            "pipeline": "agentic",
            "exp_name": "agentic",
            "output_dir": str(self.folder / "output"),
            "executor": "local",
            "seed": 3,
            "prompt_length": 64,
            "response_length": 64,
            "track_with": [],
            "save_steps": 0,
            "eval_steps": 0,
            "tokenizer": {"kind": "char", "alphabet": ALPHABET},
            "max_steps": 2,
            "rollout_batch_size": 8,
            "max_actions_per_traj": 3,
            "max_tokens_per_step": 3,
            "custom_envs": {"guess": {"environment": "guess_number", "env_config": {"high": 9}}},
            "train_env_manager": {"group_size": 4},
            "actor_train": {
                "model_args": {
                    "dtype": "fp32",
                    "disable_gradient_checkpointing": True,
                    "random_init": MODEL,
                },
                "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 8},
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

    def run(self, config: dict[str, Any], *overrides: str) -> RunResult:
        path = self.folder / f"{config['exp_name']}.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        console = Console(stream=io.StringIO(), terminal=False)
        return execute(load(path, list(overrides), self.registry), self.registry, console=console)

    def ok(self, config: dict[str, Any], *overrides: str) -> RunResult:
        result = self.run(config, *overrides)
        if result.error is not None:
            raise result.error
        return result

    def metrics(self, result: RunResult) -> list[dict[str, float]]:
        return [json.loads(line) for line in result.run_dir.metrics.read_text(encoding="utf-8").splitlines()]

    def samples(self, result: RunResult) -> list[dict[str, Any]]:
        return [json.loads(line) for line in result.run_dir.samples.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One token per byte, without a chat template."""
    return make_tokenizer(TokenizerConfig(kind="byte"), [], tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def runs(tmp_path: Path) -> AgenticRuns:
    return AgenticRuns(tmp_path)
