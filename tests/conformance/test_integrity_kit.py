"""The integrity kit: each trick is found in an environment that is weak against it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from roll_core.spec.environment import Environment, Opening, Reply, Turn
from roll_testing.integrity import TRICKS, EnvironmentIntegrity, Trick

BLOCK = re.compile(r"```(sh|python)\n(.*?)```", re.DOTALL)


class Sums(Environment):
    """Sound: the reply is compared with a number and nothing else."""

    def reset(self, task: Any, seed: int) -> Opening:
        return Opening(messages=[{"role": "user", "content": "17 + 25 ="}])

    def step(self, reply: Reply) -> Turn:
        return Turn(reward=float(reply.text.strip() == "42"), done=True)


class Distance(Sums):
    """Takes every number of a reply, NaN included."""

    def step(self, reply: Reply) -> Turn:
        try:
            return Turn(reward=-abs(float(reply.text) - 42), done=True)
        except ValueError:
            return Turn(reward=-1.0, done=True)


class Highest(Sums):
    """Has no upper limit."""

    def step(self, reply: Reply) -> Turn:
        with contextlib.suppress(ValueError):
            return Turn(reward=min(float(reply.text.partition("\n")[0]), 1e30), done=True)
        return Turn(reward=0.0, done=True)


class Backtracks(Sums):
    """A regular expression that takes exponential time."""

    def step(self, reply: Reply) -> Turn:
        return Turn(reward=float(re.fullmatch(r"(a|aa)+", reply.text) is not None and False), done=True)


class Greps(Sums):
    """Looks for the grader's output in a text that contains the reply."""

    def step(self, reply: Reply) -> Turn:
        return Turn(reward=float("5 passed" in f"log: {reply.text}\n0 passed"), done=True)


class InProcess(Sums):
    """Runs the reply's program in its own process."""

    def step(self, reply: Reply) -> Turn:
        begin = time.time()
        for _, program in BLOCK.findall(reply.text):
            with contextlib.suppress(Exception):
                exec(program, {})
        return Turn(reward=float(time.time() < begin), done=True)


class Folder(Sums):
    """Runs the reply's program in a directory, and then a grader that fails. Subclasses grade."""

    def reset(self, task: Any, seed: int) -> Opening:
        self.folder = Path(tempfile.mkdtemp())
        self.prepare()
        return super().reset(task, seed)

    def prepare(self) -> None:
        pass

    def step(self, reply: Reply) -> Turn:
        for language, program in BLOCK.findall(reply.text):
            command = ["sh", "-c"] if language == "sh" else [sys.executable, "-c"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([*command, program], cwd=self.folder, capture_output=True, timeout=0.5, check=False)
        return Turn(reward=self.grade(), done=True)

    def grade(self) -> float:
        raise NotImplementedError

    def grader(self, program: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, "-c", program], cwd=self.folder, capture_output=True, check=False)


class KeepsResults(Folder):
    """Reads a result file that the policy may have written."""

    def grade(self) -> float:
        file = self.folder / "reward.txt"
        return float(file.read_text() == "1.0\n") if file.is_file() else 0.0


class GradesBesideIt(Folder):
    """Removes result files, but the processes of the policy still run when it reads its own."""

    def grade(self) -> float:
        (self.folder / "reward.json").unlink(missing_ok=True)
        (self.folder / "reward.json").write_text('{"reward": 0.0}')
        time.sleep(0.3)
        text = (self.folder / "reward.json").read_text()
        return float(json.loads(text)["reward"]) if text else 0.0


class TestsInPlace(Folder):
    """Its tests are files of the policy's directory."""

    def prepare(self) -> None:
        (self.folder / "test.sh").write_text("exit 1\n")

    def grade(self) -> float:
        code = subprocess.run(["sh", "test.sh"], cwd=self.folder, capture_output=True, check=False).returncode
        return float(code == 0)


class OnlyOneIsFailure(Folder):
    """Counts every exit code but that of a failed test as success."""

    def grade(self) -> float:
        return float(self.grader("import time; time.sleep(0.5); raise SystemExit(1)").returncode != 1)


class ItsEnvironment(Folder):
    """Runs its grader in the policy's directory with that as HOME and search path."""

    def grade(self) -> float:
        env = {**os.environ, "PYTHONPATH": str(self.folder)}
        command = [sys.executable, "-c", "raise SystemExit(1)"]
        return float(
            subprocess.run(command, cwd=self.folder, env=env, capture_output=True, check=False).returncode == 0
        )


class ReadsPipes(Folder):
    """Opens whatever is at the place of its result."""

    def grade(self) -> float:
        file = self.folder / "score.txt"
        return 0.0 * len(file.read_text()) if file.exists() else 0.0


class FollowsLinks(Folder):
    """Writes its result through a link."""

    def grade(self) -> float:
        (self.folder / "result.json").write_text('{"passed": false}')
        return 0.0


WEAK: dict[str, type[Environment]] = {
    "forged result files": KeepsResults,
    "late writer": GradesBesideIt,
    "no finite number": Distance,
    "huge number": Highest,
    "edited tests": TestsInPlace,
    "killed grader": OnlyOneIsFailure,
    "clock": InProcess,
    "environment variables": ItsEnvironment,
    "patched modules": InProcess,
    "hanging grader": ReadsPipes,
    "links": FollowsLinks,
    "output of a grader": Greps,
}


def findings(environment: type[Environment], trick: Trick, timeout_s: float = 20.0) -> list[str]:
    class Suite(EnvironmentIntegrity):
        seeds = (0,)

        def create(self) -> Environment:
            return environment()

    Suite.timeout_s = timeout_s
    return Suite().findings(trick)


@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick.name)
def test_a_trick_is_found_in_a_weak_environment(trick: Trick) -> None:
    assert findings(WEAK[trick.name], trick, 2.0 if trick.name == "hanging grader" else 20.0)


@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick.name)
def test_a_sound_environment_has_no_findings(trick: Trick) -> None:
    assert not findings(Sums, trick)


def test_endless_expressions_are_found() -> None:
    (trick,) = (trick for trick in TRICKS if trick.name == "hanging grader")
    assert findings(Backtracks, trick, 1.0)
