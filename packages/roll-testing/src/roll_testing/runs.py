"""Runs small enough for tests of pipelines: a one-layer model, digits to be sorted, a few steps.

runs = Runs(tmp_path, "local")
lines = runs.metrics(runs.ok(runs.sft(max_steps=2)))
"""

from __future__ import annotations

import io
import json
import random
from copy import deepcopy
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
        """Write the data: `train.jsonl` and `val.jsonl`, and the pairs `train.pairs.jsonl` and `val.pairs.jsonl`."""
        self.folder, self.executor = folder, executor
        self.registry = load_registry()
        rng = random.Random(0)
        digits = [f"{number:03d}" for number in rng.sample(range(1000), 96)]
        rows = [
            {"id": i, "prompt": f"{d}>", "response": "".join(sorted(d)), "ground_truth": "".join(sorted(d))}
            for i, d in enumerate(digits)
        ]
        for name, part in (("train", rows[:64]), ("val", rows[64:])):
            for file, written in ((f"{name}.jsonl", part), (f"{name}.pairs.jsonl", map(_pair, part))):
                (folder / file).write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")

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

    def sft(self, **given: Any) -> dict[str, Any]:
        """Config of the pipeline `sft`, with the keys `given`."""
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
            | given
        )

    def preference(self, pipeline: str = "preference", **given: Any) -> dict[str, Any]:
        """Config of `preference` or `reward_model`, on pairs of sorted digits and other digits."""
        role = self.sft()["sft_train"]
        role["data_args"] = {"file_name": str(self.folder / "train.pairs.jsonl")}
        role["training_args"] |= {"learning_rate": 3e-3, "lr_scheduler_type": "constant"}
        return (
            self.base(pipeline)
            | {
                "max_steps": 3,
                "eval_steps": 3,
                "reward_train" if pipeline == "reward_model" else "actor_train": role,
                "validation": {"data_args": {"file_name": str(self.folder / "val.pairs.jsonl")}},
            }
            | given
        )

    def distill(self, **given: Any) -> dict[str, Any]:
        """Config of `distill`, without unused keys: a teacher with random weights, wider than the student."""
        base = self.rlvr() | {"pipeline": "distill", "exp_name": "distill"}
        del base["rewards"]
        wider = {**TINY, "hidden_size": 48, "initializer_range": 0.3}
        teacher = {
            "model_args": {"dtype": "fp32", "random_init": wider},
            "strategy_args": {"strategy_name": "hf_infer"},
            "device_mapping": [0],
        }
        config = base | {"teachers": {"main": teacher}} | given
        samples = config.get("distill_data") == "teacher"
        if samples:
            config["teacher_infer"] = teacher
        if (samples and "kd_support" not in given) or given.get("self_teacher") or given.get("kd_support") == "stored":
            del config["teachers"]
        if config.get("distill_data") in ("dataset", "teacher"):
            del config["actor_infer"]
        return config

    def on_ranks(
        self, config: dict[str, Any], strategy: str, ranks: int, *, replicas: int = 1, **strategy_config: Any
    ) -> dict[str, Any]:
        """The config with the roles that train or score on `ranks` ranks, and as many sequences in a step.

        `strategy` is the beginning of the names: `hf` of `hf_train` and `hf_infer`.
        """
        found = deepcopy(config) | {"executor": "ray", "num_gpus_per_node": ranks}
        roles = {**found, **found.get("teachers", {})}
        for name, role in roles.items():
            if isinstance(role, dict) and "strategy_args" in role and name not in ("actor_infer", "teacher_infer"):
                trains = "training_args" in role
                chosen = f"{strategy}_{'train' if trains else 'infer'}"
                role["strategy_args"] = {"strategy_name": chosen, "strategy_config": strategy_config}
                role["device_mapping"] = list(range(ranks))
                if trains:
                    role["training_args"]["per_device_train_batch_size"] //= replicas
        return found

    def learnt(self, result: RunResult) -> list[dict[str, float]]:
        """Metrics of training and validation of each step, without learning rate and time."""
        learnt = ("train/", "val/", "actor/", "distillation/")
        return [
            {name: value for name, value in line.items() if name.startswith(learnt) and not name.endswith("/lr")}
            for line in self.metrics(result)
        ]

    def rlvr(self, **given: Any) -> dict[str, Any]:
        """Config of the pipeline `rlvr`, with the keys `given`."""
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
            | given
        )

    def ahead(
        self, strategy: str, ranks: int, *, replicas: int = 1, **strategy_config: Any
    ) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        """Metrics of `rlvr` with generation one step ahead of training, on the engine's own slot.

        First those of the policy on `ranks` ranks, then those of one rank of `hf_train` on the recorded rollouts.
        """
        (self.folder / "rollrewards.py").write_text(REWARDS, encoding="utf-8")
        config = self.rlvr(exp_name="ahead", async_generation_ratio=1.0, record_rollouts=True)
        config["actor_infer"]["device_mapping"] = [ranks]
        config = self.on_ranks(config, strategy, ranks, replicas=replicas, **strategy_config)
        recorded = self.ok(config | {"num_gpus_per_node": ranks + 1})
        replay = {"async_generation_ratio": 1.0, "replay_rollouts": str(recorded.run_dir.path), "num_gpus_per_node": 2}
        alone = self.rlvr(exp_name="alone", **replay)
        alone["actor_infer"]["device_mapping"] = [1]
        return self.learnt(recorded), self.learnt(self.ok(alone))

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


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    right = row["response"]
    wrong = right[::-1] if right[::-1] != right else right + "0"
    kept = {name: row[name] for name in ("id", "prompt", "ground_truth")}
    return kept | {"chosen": right, "rejected": wrong, "margin": 0.5}


REWARDS = '''
def share_of_digits(prompt, response, **row):
    """Something that differs between responses, so that there is an advantage."""
    return sum(c.isdigit() for c in response) / 6 + (len(response) % 2)

def components(prompt, response, **row):
    digits, odd = sum(c.isdigit() for c in response) / 6, float(len(response) % 2)
    return {"value": digits + odd, "digits": digits, "odd": odd, "answer": response}

def constant(prompt, response, **row):
    return 1.0

def broken(prompt, response, **row):
    raise RuntimeError("the judge is out")

def sometimes(prompt, response, **row):
    if len(response) % 2:
        raise RuntimeError("odd")
    return float(len(response))

def flaky(prompt, response, **row):
    """Fails the first two times that it sees a response."""
    import hashlib, pathlib
    seen = pathlib.Path(__file__).with_name("seen") / hashlib.sha256(f"{prompt}|{response}".encode()).hexdigest()
    seen.parent.mkdir(exist_ok=True)
    times = len(seen.read_text()) if seen.exists() else 0
    seen.write_text("." * (times + 1))
    if times < 2:
        raise RuntimeError("not yet")
    return share_of_digits(prompt, response)

def endless(prompt, response, **row):
    import pathlib, time
    pathlib.Path("judging").touch()
    time.sleep(60)
'''
"""Module `rollrewards` of rewards, to be written into the folder of the runs."""
