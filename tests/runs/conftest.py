"""Runs small enough for tests: a one-layer model, digits to be sorted, a few steps."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_core.builtin.cpu import CpuPlatform
from roll_core.config import load
from roll_core.plugins.registry import load_registry
from roll_core.runtime.cluster.executors import ray_instance
from roll_core.runtime.cluster.executors.ray_instance import RayInstance
from roll_core.runtime.records.console import Console
from roll_core.runtime.records.tracking import repeatable
from roll_core.runtime.run.loop import RunResult, execute

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
        self.folder, self.executor = folder, executor
        self.registry = load_registry()
        rng = random.Random(0)
        digits = [f"{number:03d}" for number in rng.sample(range(1000), 96)]
        rows = [
            {"id": i, "prompt": f"{d}>", "response": "".join(sorted(d)), "ground_truth": "".join(sorted(d))}
            for i, d in enumerate(digits)
        ]
        for name, part in (("train", rows[:64]), ("val", rows[64:])):
            lines = "".join(json.dumps(row) + "\n" for row in part)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")

    def base(self, pipeline: str) -> dict[str, Any]:
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
        return {"dtype": "fp32", "disable_gradient_checkpointing": True}

    def sft(self, **given: Any) -> dict[str, Any]:
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

    def rlvr(self, **given: Any) -> dict[str, Any]:
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

    def run(self, config: dict[str, Any], *overrides: str) -> RunResult:
        path = self.folder / f"{config['exp_name']}.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        self.screen = io.StringIO()
        console = Console(stream=self.screen, terminal=False)
        return execute(load(path, list(overrides), self.registry), self.registry, console=console)

    def metrics(self, result: RunResult) -> list[dict[str, float]]:
        """The lines of `metrics.jsonl`."""
        return [json.loads(line) for line in result.run_dir.metrics.read_text(encoding="utf-8").splitlines()]

    def timeless(self, result: RunResult) -> list[dict[str, float]]:
        """The same without what depends on the clock, and on how engines batched."""
        return [repeatable(line) for line in self.metrics(result)]

    def ok(self, config: dict[str, Any], *overrides: str) -> RunResult:
        result = self.run(config, *overrides)
        if result.error is not None:
            raise result.error
        return result


REWARDS = '''
def share_of_digits(prompt, response, **row):
    """Something that differs between answers, so that there is an advantage."""
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
    """Fails the first two times that it sees an answer."""
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


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Installs a module beside these tests as the plugin `roll-<its name>`; returns the folder where it is."""

    def install(module: Path) -> Path:
        folder, name = tmp_path / "site", module.stem
        info = folder / f"roll_{name}-1.dist-info"
        info.mkdir(parents=True)
        shutil.copy(module, folder / f"roll_{name}.py")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: roll-{name}\nVersion: 1\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[roll.plugins]\nroll-{name} = roll_{name}\n", encoding="utf-8")
        monkeypatch.syspath_prepend(folder)
        return folder

    return install


@pytest.fixture(scope="session")
def connected_ray() -> Iterator[None]:
    """One Ray instance for all tests, started as a run starts its own and with room for the workers of any test.

    An executor that finds this process connected uses it and leaves it running.
    """
    instance = RayInstance(CpuPlatform())
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setattr(ray_instance, "usable_cores", lambda: 8)
        instance.open()
    yield
    instance.close()


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def runs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Every test that uses it runs on both executors: pipelines cannot tell them apart.

    Starting workers takes Ray longer than the run itself, so without `ROLL_EVERY_EXECUTOR=1` (which CI sets) only the
    tests marked `on_ray` run there; the repository's conftest.py leaves the others out.
    """
    if request.param == "ray":
        request.getfixturevalue("connected_ray")
    return _prepare(request.param, tmp_path, monkeypatch)


@pytest.fixture(params=[pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def ray_runs(
    request: pytest.FixtureRequest, connected_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Runs:
    """For what only several workers can show."""
    return _prepare(request.param, tmp_path, monkeypatch)


@pytest.fixture
def local_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """For faults that are put into this process."""
    return _prepare("local", tmp_path, monkeypatch)


def _prepare(executor: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    (folder / "rollrewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    return Runs(folder, executor)
