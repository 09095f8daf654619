"""Runs the quick start's GRPO on an engine in a subprocess, shortened and in full. For plugins of this repository:

    class TestQuickStart(QuickStartTests):
        engine = "vllm"
        settings = {"kv_cache_memory_bytes": 64 << 20}

Only the engine's name, its settings and the placement of the roles differ from the quick start.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

log = logging.getLogger(__name__)

SHORT = (
    "max_steps=2",
    "eval_steps=0",
    "rollout_batch_size=8",
    "num_return_sequences_in_group=4",
    "actor_train.training_args.per_device_train_batch_size=16",
    "actor_train.training_args.gradient_accumulation_steps=2",
    "guards.logprob_probe.every=1",
)
APART = ("executor=ray", "num_gpus_per_node=2", "actor_infer.device_mapping=[1]")
PLACES = {
    "one process": ("executor=local",),
    "taking turns": ("executor=ray",),
    "apart": APART,
    "apart and asynchronous": (*APART, "async_generation_ratio=1", "max_steps=4"),
}
FULL = {
    "colocated": (),
    "disaggregated": APART,
    "disaggregated and asynchronous": (*APART, "async_generation_ratio=1"),
}
"""Overrides of the full quick start with all its steps: only the placement of the roles changes."""
TWO = ("executor=ray", "num_gpus_per_node=3", "actor_infer.device_mapping=[1, 2]", "async_generation_ratio=1")
GATED = """\
import time
from pathlib import Path

from examples.quickstart.rewards import sorted_digits

HERE = Path(__file__).parent


def judge(prompt, response, ground_truth, **row):
    metrics = HERE / "quickstart-grpo" / "latest" / "metrics.jsonl"
    while metrics.is_file() and metrics.stat().st_size and not (HERE / "go-on").exists():
        time.sleep(0.05)
    return sorted_digits(prompt, response, ground_truth)
"""
"""Reward function that blocks after the first step until the file `go-on` exists. Responses graded before then suffice
for at most two more steps."""
BOUND = 1e-4
"""Bound on the difference between engine and trainer logprobs of the same weights in fp32."""
RUN_S = 800.0
FULL_RUN_S = 5400.0
TAUGHT, LEARNED = 0.6, 0.94
"""Held-out accuracy that SFT must stay below, and that GRPO must exceed: 0.438 and 0.968 with the embedded engine."""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """Output folder of a finished run."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Metrics of the training steps."""
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        return [line for line in map(json.loads, text.splitlines()) if line["step"]]

    @property
    def accuracies(self) -> list[float]:
        """Accuracies on held-out prompts: before the first step, and after each evaluation of the run."""
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        found = [json.loads(line).get("val/score/mean") for line in text.splitlines()]
        return [score for score in found if score is not None]

    @property
    def record(self) -> dict[str, Any]:
        """Content of `run.json`."""
        found: dict[str, Any] = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
        return found

    @property
    def log(self) -> str:
        """Text of the run's log."""
        return (self.folder / "log.txt").read_text(encoding="utf-8")


class QuickStartTests:
    """Short runs start after half of the quick start's SFT: responses are then correct often enough to earn rewards."""

    engine: ClassVar[str]
    """Name of the infer strategy."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """`strategy_config` of the engine."""
    repository: ClassVar[Path]
    """Root of the repository, which has `examples/quickstart`."""

    @pytest.fixture(scope="class")
    @classmethod
    def pretrained(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Folder with the quick start's data, and its model after 100 steps of SFT."""
        return cls()._taught(tmp_path_factory.mktemp("sft"), "max_steps=100", "eval_steps=0")

    @pytest.fixture(scope="class")
    @classmethod
    def taught(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Folder with the quick start's data, and its model after all steps of SFT."""
        return cls()._taught(tmp_path_factory.mktemp("whole-sft"))

    @pytest.mark.ray
    @pytest.mark.slow
    @pytest.mark.parametrize("where", PLACES)
    def test_short_run_works(self, pretrained: Path, tmp_path: Path, where: str) -> None:
        """Engine and trainer logprobs of the same weights must agree, for every placement of the roles.

        Slow, because other runs show it: the run with a killed replica runs apart and asynchronously, that of agents in
        one process, and those of the embedded engine on a slot that the roles take alternately.
        """
        left = self.grpo(pretrained, tmp_path, *PLACES[where])
        self.check(left, num_steps=4 if "asynchronous" in where else 2)
        transport = "shared" if where == "one process" else "shm"
        assert left.record["weight_transports"] == {"actor_train -> actor_infer": transport}
        if "asynchronous" in where:
            assert max(line["rollout/staleness/max"] for line in left.metrics) == 1

    @pytest.mark.ray
    @pytest.mark.parametrize("victim", [pytest.param("worker", marks=pytest.mark.slow), "engine"])
    def test_a_replica_that_is_killed_is_replaced(self, pretrained: Path, tmp_path: Path, victim: str) -> None:
        """If a worker or its engine processes are killed, the replica must be replaced and the run must complete."""
        log = tmp_path / "run.txt"
        (tmp_path / "gated.py").write_text(GATED, encoding="utf-8")
        gate = ("rewards.sorting.function=gated:judge", f"+rewards.sorting.timeout_s={RUN_S}")
        run = self._begin(self._grpo(pretrained, tmp_path, *TWO, "max_steps=6", *gate), log, tmp_path)
        try:
            deadline = time.monotonic() + RUN_S
            while not self._has_begun(tmp_path) and run.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            worker, engine = _processes(run.pid, "actor_infer-1")
            for each in (worker,) if victim == "worker" else engine:
                os.kill(each.pid, signal.SIGKILL)
            (tmp_path / "go-on").touch()
        except BaseException:
            run.kill()
            raise
        self._end(run, log)
        left = FinishedRun(tmp_path / "quickstart-grpo" / "latest")
        self.check(left, num_steps=6)
        assert left.metrics[-1]["rollout/lost_replicas"] == 1
        assert re.search(r"actor_infer rank 1: .*\(pid \d+\)", left.log)
        assert left.record["weight_transports"] == {"actor_train -> actor_infer": "shm"}
        assert max(line["rollout/staleness/max"] for line in left.metrics) <= 1

    @pytest.mark.slow
    def test_evaluation_equals_that_with_the_embedded_engine(self, pretrained: Path, tmp_path: Path) -> None:
        """`roll-core eval` of the taught model: the most likely tokens, in fp32, have the same scores."""
        scores = []
        for name, settings in ((self.engine, self.settings), ("hf_infer", {})):
            folder, strategy = tmp_path / name, "actor_infer.strategy_args"
            command = self._command(
                "grpo.yaml",
                f"output_dir={folder}",
                f"validation.data_args.file_name={pretrained}/val.jsonl",
                "+validation.data_args.max_samples=64",
                "validation.generating_args.temperature=0",
                f"{strategy}.strategy_name={name}",
                *(f"+{strategy}.strategy_config.{key}={json.dumps(value)}" for key, value in settings.items()),
            )
            command[3:4] = ["eval", str(pretrained / "quickstart-sft" / "latest" / "export")]
            log = tmp_path / f"{name}.txt"
            self._end(self._begin(command, log), log)
            (last,) = FinishedRun(folder / "quickstart-grpo-eval" / "latest").metrics
            scores.append({key: value for key, value in last.items() if key.startswith("val/")})
        assert scores[0] == scores[1]
        assert 0 < scores[0]["val/score/mean"] < 1

    @pytest.mark.ray
    @pytest.mark.slow
    @pytest.mark.timeout(2 * FULL_RUN_S)
    @pytest.mark.parametrize("where", FULL)
    def test_training_equals_that_with_the_embedded_engine(self, taught: Path, tmp_path: Path, where: str) -> None:
        """The full quick start must reach the accuracy that it reaches with the embedded engine.

        `--log-cli-level=INFO` shows the accuracies.
        """
        left = self.whole(taught, tmp_path, *FULL[where])
        assert left.accuracies[0] < TAUGHT
        assert left.accuracies[-1] > LEARNED
        if "asynchronous" in where:
            assert max(line["rollout/staleness/max"] for line in left.metrics) == 1
        gaps = [line["actor/logprob_gap"] for line in left.metrics if "actor/logprob_gap" in line]
        assert max(gaps) < BOUND

    # -- for tests of one engine ---------------------------------------------------------------------------------------

    def grpo(self, pretrained: Path, folder: Path, *overrides: str) -> FinishedRun:
        """Run the shortened GRPO to its end."""
        log = folder / "run.txt"
        self._end(self._begin(self._grpo(pretrained, folder, *overrides), log), log)
        return FinishedRun(folder / "quickstart-grpo" / "latest")

    def whole(self, taught: Path, folder: Path, *overrides: str) -> FinishedRun:
        """Run the full quick start to its end, with seeded rollouts so that the result is reproducible."""
        output = folder / "run.txt"
        command = self._whole(taught, folder, "+seeded_rollouts=true", *overrides)
        self._end(self._begin(command, output), output, FULL_RUN_S)
        left = FinishedRun(folder / "quickstart-grpo" / "latest")
        log.info("%s, %s: accuracies %s", self.engine, " ".join(overrides), left.accuracies)
        return left

    def check(self, left: FinishedRun, *, num_steps: int) -> None:
        """Fail unless the run has all steps, generated tokens in each of them, and correct logprobs."""
        assert [line["step"] for line in left.metrics] == list(range(1, num_steps + 1))
        assert all(line["tokens/generated"] > 0 for line in left.metrics)
        # A step whose tokens were all sampled under older weights reports no gap.
        for name in ("actor/logprob_gap", "weight_sync/logprob_probe"):
            found = [line[name] for line in left.metrics if name in line]
            assert found
            assert max(found) < BOUND

    # -- helpers -------------------------------------------------------------------------------------------------------

    @property
    def _examples(self) -> Path:
        return self.repository / "examples" / "quickstart"

    def _command(self, config: str, *overrides: str) -> list[str]:
        return [sys.executable, "-m", "roll_core", "run", str(self._examples / config), *overrides]

    def _taught(self, folder: Path, *overrides: str) -> Path:
        subprocess.run([sys.executable, str(self._examples / "make_data.py"), str(folder)], check=True)
        command = self._command(
            "sft.yaml",
            f"output_dir={folder}",
            f"sft_train.data_args.file_name={folder}/sft.jsonl",
            f"validation.data_args.file_name={folder}/val.jsonl",
            *overrides,
        )
        self._end(self._begin(command, folder / "sft.txt"), folder / "sft.txt")
        return folder

    def _grpo(self, pretrained: Path, folder: Path, *overrides: str) -> list[str]:
        return self._whole(pretrained, folder, *SHORT, *overrides)

    def _whole(self, pretrained: Path, folder: Path, *overrides: str) -> list[str]:
        return self._command(
            "grpo.yaml",
            f"output_dir={folder}",
            f"pretrain={pretrained}/quickstart-sft/latest/export",
            f"actor_train.data_args.file_name={pretrained}/train.jsonl",
            f"validation.data_args.file_name={pretrained}/val.jsonl",
            f"actor_infer.strategy_args.strategy_name={self.engine}",
            *(f"+actor_infer.strategy_args.strategy_config.{key}={value}" for key, value in self.settings.items()),
            *overrides,
        )

    def _begin(self, command: list[str], log: Path, *modules: Path) -> subprocess.Popen[str]:
        # `python -m` puts the repository, with the reward's module, on the path. `modules` are folders of others.
        path = os.pathsep.join(filter(None, [*map(str, modules), os.environ.get("PYTHONPATH", "")]))
        with log.open("w", encoding="utf-8") as file:
            return subprocess.Popen(
                command,
                cwd=self.repository,
                env={**os.environ, "PYTHONPATH": path},
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def _end(self, run: subprocess.Popen[str], log: Path, limit_s: float = RUN_S) -> None:
        try:
            status = run.wait(limit_s)
        except subprocess.TimeoutExpired:
            run.kill()
            status = None
        said = log.read_text(encoding="utf-8")
        assert status == 0, f"status {status}: {said[-4000:]}"
        assert "Exception ignored" not in said, said[-4000:]

    def _has_begun(self, folder: Path) -> bool:
        found = folder / "quickstart-grpo" / "latest" / "metrics.jsonl"
        return found.is_file() and found.stat().st_size > 0


def _processes(run: int, name: str) -> tuple[psutil.Process, list[psutil.Process]]:
    """Return the worker of this name in a run, and its child processes, which are the engine's."""
    named = {each.pid: each for each in _named(run, name)}
    top = next(each for each in named.values() if each.ppid() not in named)
    worker = top if any("ray::" in word for word in top.cmdline()) else top.parent()
    assert worker is not None
    return worker, worker.children(recursive=True)


def _named(run: int, name: str) -> Iterator[psutil.Process]:
    for each in psutil.Process(run).children(recursive=True):
        try:
            if each.environ().get("WORKER_NAME") == name:
                yield each
        except psutil.Error:  # the process has exited meanwhile
            continue
