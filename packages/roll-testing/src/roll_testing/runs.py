"""Runs small enough for tests of pipelines: a one-layer model, digits to be sorted, a few steps.

runs = Runs(tmp_path, "local")
lines = runs.metrics(runs.ok(runs.sft(max_steps=2)))
"""

from __future__ import annotations

import io
import json
import random
from typing import TYPE_CHECKING, Any

import yaml

from roll_core.config import load
from roll_core.plugins.registry import load_registry
from roll_core.runtime.records.console import Console
from roll_core.runtime.records.tracking import repeatable
from roll_core.runtime.run.loop import RunResult, execute

if TYPE_CHECKING:
    from pathlib import Path

TINY = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


class Runs:
    """A directory with data, and configs that are run in this process."""

    def __init__(self, folder: Path, executor: str) -> None:
        """Write the data, `train.jsonl` and `val.jsonl`."""
        self.folder, self.executor = folder, executor
        self.registry = load_registry()
        rng = random.Random(0)
        digits = [f"{number:03d}" for number in rng.sample(range(1000), 96)]
        rows = [
            {"id": i, "prompt": f"{d}>", "response": "".join(sorted(d)), "ground_truth": "".join(sorted(d))}
            for i, d in enumerate(digits)
        ]
        for name, part in (("train", rows[:64]), ("val", rows[64:])):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")

    def base(self, pipeline: str) -> dict[str, Any]:
        """Keys of every run."""
        return {
            "pipeline": pipeline,
            "exp_name": pipeline,
            "output_dir": str(self.folder / "output"),
            "executor": self.executor,
            "seed": 3,
            "prompt_length": 8,
            "response_length": 6,
            "track_with": [],
            "save_steps": 0,
            "eval_steps": 0,
            "tokenizer": {"kind": "char", "alphabet": "0123456789>"},
        }

    def model(self) -> dict[str, Any]:
        """`model_args` of a trained role, without its model."""
        return {"dtype": "fp32", "disable_gradient_checkpointing": True}

    def sft(self, **keys: Any) -> dict[str, Any]:
        """Config of the pipeline `sft`, with `keys`."""
        return (
            self.base("sft")
            | {
                "max_steps": 4,
                "sft_train": {
                    "model_args": self.model() | {"random_init": TINY},
                    "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 16},
                    "data_args": {"file_name": str(self.folder / "train.jsonl")},
                    "strategy_args": {"strategy_name": "hf_train"},
                    "device_mapping": [0],
                },
                "validation": {"data_args": {"file_name": str(self.folder / "val.jsonl")}},
            }
            | keys
        )

    def rlvr(self, **keys: Any) -> dict[str, Any]:
        """Config of the pipeline `rlvr`, with `keys`."""
        return (
            self.base("rlvr")
            | {
                "max_steps": 3,
                "rollout_batch_size": 4,
                "num_return_sequences_in_group": 4,
                "actor_train": {
                    "model_args": self.model() | {"random_init": TINY},
                    "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 8},
                    "data_args": {"file_name": str(self.folder / "train.jsonl")},
                    "strategy_args": {"strategy_name": "hf_train"},
                    "device_mapping": [0],
                },
                "actor_infer": {
                    "model_args": {"dtype": "fp32"},
                    "strategy_args": {"strategy_name": "hf_infer"},
                    "device_mapping": [0],
                },
                "rewards": {"digits": {"reward": "function", "function": "rollrewards:share_of_digits"}},
            }
            | keys
        )

    def run(self, config: dict[str, Any], *overrides: str) -> RunResult:
        """Run a config with overrides such as `seed=1`; `self.screen` has the console's text."""
        path = self.folder / f"{config['exp_name']}.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        self.screen = io.StringIO()
        console = Console(stream=self.screen, terminal=False)
        return execute(load(path, list(overrides), self.registry), self.registry, console=console)

    def metrics(self, result: RunResult) -> list[dict[str, float]]:
        """Lines of `metrics.jsonl`."""
        return [json.loads(line) for line in result.run_dir.metrics.read_text(encoding="utf-8").splitlines()]

    def timeless(self, result: RunResult) -> list[dict[str, float]]:
        """Lines of `metrics.jsonl` without values that depend on the clock or on batching in engines."""
        return [repeatable(line) for line in self.metrics(result)]

    def ok(self, config: dict[str, Any], *overrides: str) -> RunResult:
        """Run a config, and raise its error if it fails."""
        result = self.run(config, *overrides)
        if result.error is not None:
            raise result.error
        return result


REWARDS = '''
def share_of_digits(prompt, response, **row):
    """Something that differs between responses, so that there is an advantage."""
    return sum(c.isdigit() for c in response) / 6 + (len(response) % 2)
'''
"""Module `rollrewards` of rewards, to be written into the folder of the runs."""
