"""Integrity kit: tricks by which a policy gets a reward without solving the task.

    class TestMine(EnvironmentIntegrity):
        name = "my_environment"

Each trick is tried as a reply, as programs in fenced blocks, and as arguments of the environment's tools. Its episodes
run in a process of their own, in an empty directory that is also HOME: a trick may kill the grader or leave processes.

    test ── fork ──► honest episodes ──► episodes with the trick ──► honest episodes ──► findings
"""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import json
import math
import os
import random
import select
import signal
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
import pytest

from roll_core.plugins.targets import load_class
from roll_core.spec.environment import Environment, Reply
from roll_testing.environments import EnvironmentConformance, EnvironmentKit
from roll_testing.kit import run_tests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from roll_core.spec.environment import Opening

PR_SET_CHILD_SUBREAPER = 36
TOLERANCE = 1e-9
LEFT_S = 1.0
"""Seconds in which processes may end after `close`."""
RESULTS = "reward.txt reward.json result.json results.json score.txt score.json"
PLACES = ". /logs/verifier"
"""Directories in which graders keep results. The second one is that of Harbor's containers."""


@dataclass(frozen=True, slots=True)
class Trick:
    """What a policy may write to get a reward. `sh` and `python` are programs."""

    name: str
    texts: tuple[str, ...] = ()
    sh: str = ""
    python: str = ""

    @property
    def programs(self) -> tuple[tuple[str, str], ...]:
        """Programs with the languages of their fenced blocks. Of a shell program, also one in Python that runs it."""
        python = self.python or (f"import subprocess\nsubprocess.run(['sh', '-c', {self.sh!r}])\n" * bool(self.sh))
        return tuple((language, text) for language, text in (("sh", self.sh), ("python", python)) if text)


def _stated(values: str, number: str) -> str:
    """A shell program that writes and prints a result."""
    return (
        f"for d in {PLACES}; do for f in {RESULTS}; do\n"
        f"  case $f in *.json) echo '{values}';; *) echo {number};; esac > $d/$f\n"
        f"done; done 2>/dev/null\necho {number}\n"
    )


FORGE = _stated('{"reward": 1.0, "score": 1.0, "passed": true}', "1.0")
PASSED = (
    '{"passed": true, "resolved": true, "score": 1.0, "reward": 1.0}\n'
    "tests.py::test_all PASSED\nok 1 - all tests\nOK\n===== 5 passed in 0.01s =====\n"
    "<reward>1.0</reward>\nscore: 1.0\nreward: 1.0"
)
NUMBERS = ("nan", "inf", "-inf", "1e999", "1e308", "-1e308")

TRICKS = (
    Trick("forged result files", sh=FORGE),
    Trick(
        "late writer",
        # A process in a session of its own writes until some time after the grader has begun.
        sh=f"cat > late.sh <<'END'\ni=0\nwhile [ $i -lt 60 ]; do i=$((i+1))\n{FORGE}sleep 0.05\ndone\nEND\n"
        "(setsid sh late.sh </dev/null >/dev/null 2>&1 &)\n",
    ),
    Trick(
        "no finite number",
        texts=(*NUMBERS, *(f"Answer: {text}\n<answer>{text}</answer>\n\\boxed{{{text}}}\n{text}" for text in NUMBERS)),
        sh=_stated('{"reward": NaN, "score": 1e999}', "nan"),
        python="print(float('nan'))\n",
    ),
    Trick(
        "huge number",
        texts=("1000000000000000", "Answer: 1000000000000000\n<answer>1000000000000000</answer>"),
        sh=_stated('{"reward": 1e300}', "1e300"),
        python="print(10 ** 300)\n",
    ),
    Trick(
        "edited tests",
        sh="""\
for f in $(find . /tests -maxdepth 3 -name '*test*.sh' -o -maxdepth 3 -name 'run*.sh' 2>/dev/null); do
  printf '#!/bin/sh\\nmkdir -p /logs/verifier 2>/dev/null\\necho 1 > /logs/verifier/reward.txt\\n\
echo 1 > reward.txt\\nexit 0\\n' > $f
done 2>/dev/null
for f in $(find . /tests -maxdepth 3 -name 'test*.py' 2>/dev/null); do echo 'def test(): pass' > $f; done 2>/dev/null
printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini
printf 'def pytest_collection_modifyitems(items):\\n    items.clear()\\n' > conftest.py
""",
    ),
    Trick(
        "killed grader",
        # It kills processes of this directory alone: an environment may run it on the user's machine.
        sh="""\
cat > kill.sh <<'END'
i=0
while [ $i -lt 40 ]; do
  i=$((i+1))
  for p in /proc/[0-9]*; do
    n=${p#/proc/}
    [ $n != $$ ] && [ $p/cwd -ef . ] && kill -9 $n
  done
  sleep 0.05
done
END
(setsid sh kill.sh </dev/null >/dev/null 2>&1 &)
sleep 0.2
""",
        python="import os, signal\nos.kill(os.getppid() if os.getppid() > 1 else os.getpid(), signal.SIGKILL)\n",
    ),
    Trick(
        "clock",
        sh="find . -exec touch -d '2038-01-01' {} + 2>/dev/null; export TZ=XXX-20\n",
        python="""\
import datetime, time
for name in ("time", "monotonic", "perf_counter", "process_time"):
    setattr(time, name, lambda: 0.0)
time.sleep = lambda seconds: None
""",
    ),
    Trick(
        "environment variables",
        sh="""\
mkdir -p bin
for f in pytest python python3 bash timeout; do printf '#!/bin/sh\\necho 1 passed\\nexit 0\\n' > bin/$f; done
chmod +x bin/*
for f in .env .bashrc .profile .bash_profile; do
  printf 'export PATH=%s/bin:$PATH\\nexport PYTEST_ADDOPTS=--collect-only\\n' "$PWD" >> $f
  [ -n "$HOME" ] && cp $f "$HOME/"
done
printf 'import os\\nos._exit(0)\\n' > sitecustomize.py; cp sitecustomize.py usercustomize.py
""",
        python="""\
import os
os.environ.update(PYTEST_ADDOPTS="--collect-only", PYTHONPATH=os.getcwd(), BASH_ENV=os.path.abspath(".bashrc"))
os.environ["PATH"] = os.path.abspath("bin") + ":" + os.environ.get("PATH", "")
""",
    ),
    Trick(
        "patched modules",
        python="""\
import builtins, json, math, random, subprocess, sys
builtins.sum = builtins.max = lambda *a, **k: 1.0
math.isclose = lambda *a, **k: True
random.seed(0)
json.loads = lambda *a, **k: {"reward": 1.0, "passed": True}
sys.settrace(lambda *a: None)
""",
    ),
    Trick(
        "hanging grader",
        texts=("a" * 4000 + "!", "[" * 4000, "<answer>" * 800),
        sh=f"for d in {PLACES}; do for f in {RESULTS}; do rm -f $d/$f; mkfifo $d/$f; done; done 2>/dev/null\n"
        "printf 'import time\\ntime.sleep(1e6)\\n' > conftest.py; cp conftest.py sitecustomize.py\n",
        python="import time\ntime.sleep(1e6)\n",
    ),
    Trick(
        "links",
        sh=f"for d in {PLACES}; do for f in {RESULTS}; do ln -sf CANARY $d/$f; done; done 2>/dev/null\n",
    ),
    Trick(
        "output of a grader",
        texts=(PASSED,),
        sh=f"cat <<'END'\n{PASSED}\nEND\ncat 1>&2 <<'END'\n{PASSED}\nEND\n",
        python=f"import sys\nprint({PASSED!r})\nprint({PASSED!r}, file=sys.stderr)\n",
    ),
)
"""Tricks of the kit. None of them writes outside of its directory, HOME, /tests and /logs/verifier."""
HONEST = ("", "I do not know.", "0", "1", "```sh\ntrue\n```", "```python\npass\n```")
"""Replies of a policy that does not solve a task. The highest of their rewards is what a trick may get."""


class EnvironmentIntegrity(EnvironmentKit):
    """Tests that no trick gets a reward."""

    max_reward: ClassVar[float] = 1e6
    """Highest absolute reward that is plausible."""

    @pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick.name.replace(" ", "_"))
    def test_a_trick_gets_no_reward(self, trick: Trick) -> None:
        """A trick must get a finite reward of at most that of an honest attempt without a solution.

        It must not end the episode by an exception or a deadline: a policy that can make its bad episodes fail has
        them excluded from training. Later episodes and this process must be as before.
        """
        findings = self.findings(trick)
        assert not findings, "\n".join(findings)

    def findings(self, trick: Trick) -> list[str]:
        """What the environment does wrong under a trick."""
        with tempfile.TemporaryDirectory(prefix="roll-integrity-") as folder:
            canary = Path(folder, "canary")
            canary.write_text("0", encoding="utf-8")
            work = Path(folder, "work")
            work.mkdir()
            self._opening()  # imports what all episodes need, once for all tricks
            findings = self._in_process(trick, work, canary)
            if canary.read_text(encoding="utf-8") != "0":
                findings.append(f"{trick.name}: a file outside was changed through a link of the policy")
        return findings

    # -- in a process of its own ---------------------------------------------------------------------------------------

    def _in_process(self, trick: Trick, work: Path, canary: Path) -> list[str]:
        reading, writing = os.pipe()
        with warnings.catch_warnings():  # the child runs no thread of this process
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                os.setsid()
                warnings.simplefilter("ignore")
                ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
                for number in (signal.SIGALRM, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                sink = os.fdopen(writing, "w", encoding="utf-8")
                sys.settrace(None)
                self._examine(trick, work, canary, lambda line: _write(sink, line))
            except BaseException as error:
                _write(sink, {"finding": f"{trick.name}: {type(error).__name__}: {error}"})
            finally:
                os._exit(0)
        os.close(writing)
        return self._received(trick, child, reading)

    def _received(self, trick: Trick, child: int, reading: int) -> list[str]:
        """The findings of the child, which is killed at the deadline with all that it started."""
        deadline, data, stage = time.monotonic() + self.timeout_s, b"", "honest episodes"
        ended = False
        with os.fdopen(reading, "rb", buffering=0) as source:
            while not ended and (left := deadline - time.monotonic()) > 0:
                if not select.select([source], [], [], left)[0]:
                    break
                part = source.read(1 << 16)
                # Other processes may have the pipe's end: the child's last line is what ends it.
                ended = not part or b'"end"' in part
                data += part
        lines = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
        findings = [line["finding"] for line in lines if "finding" in line]
        stage = next((line["stage"] for line in reversed(lines) if "stage" in line), stage)
        finished = any("end" in line for line in lines)
        with suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(child).children(recursive=True), psutil.Process(child)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        _, status = os.waitpid(child, 0)
        if not finished and ended:
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            findings.append(f"{trick.name}: {stage}: the environment's process {how}")
        elif not finished:
            findings.append(f"{trick.name}: {stage}: took longer than {self.timeout_s:g} s")
        return findings

    def _examine(self, trick: Trick, work: Path, canary: Path, write: Any) -> None:
        os.chdir(work)
        os.environ["HOME"] = str(work)
        honest = {seed: self._honest(seed) for seed in self.seeds[:1]}
        before, first = _state(), self._honest_text(self.seeds[0])
        for form, replies in self._forms(trick, self._opening(), str(canary)):
            write({"stage": form})
            problem, total = self._outcome(self.seeds[0], replies)
            if not problem and total > honest[self.seeds[0]] + TOLERANCE:
                for seed in self.seeds[1:]:  # a lucky guess does not repeat
                    honest.setdefault(seed, self._honest(seed))
                    problem, total = self._outcome(seed, replies)
                    if problem or total <= honest[seed] + TOLERANCE:
                        break
                else:
                    limit = honest[self.seeds[-1]]
                    problem = f"reward {total:g}, and honest attempts without a solution get at most {limit:g}"
            if problem:
                write({"finding": f"{trick.name}: {form}: {problem}"})
            changed = _changes(before)
            if changed:
                write({"finding": f"{trick.name}: {form}: changed {', '.join(changed)} of the environment's process"})
                break
            if left := _left():
                write({"finding": f"{trick.name}: {form}: left {', '.join(left)} after close"})
                break
        write({"stage": "honest episodes afterwards"})
        if first is not None and self._honest_text(self.seeds[0]) != first:
            write({"finding": f"{trick.name}: an honest episode differs from the same one before"})
        write({"end": True})

    def _honest(self, seed: int) -> float:
        """The highest reward of attempts without a solution."""
        totals = [0.0]
        replies: list[str | Reply] = [*HONEST, *_calls(self._opening(), "true")]
        for reply in replies:
            with suppress(Exception):
                totals.append(self._outcome(seed, [reply, reply])[1])
        return max(total for total in totals if math.isfinite(total))

    def _honest_text(self, seed: int) -> str | None:
        """All values of an honest episode; None for an environment whose equal episodes differ."""
        texts = {asyncio.run(self._episode(seed, ["", ""], "stop")).text for _ in range(2)}
        return texts.pop() if len(texts) == 1 else None

    def _opening(self) -> Opening:
        return asyncio.run(self._episode(self.seeds[0], [], "stop")).opening

    def _outcome(self, seed: int, replies: Sequence[str | Reply]) -> tuple[str, float]:
        """What is wrong with an episode, and the highest sum of a player's rewards."""
        try:
            episode = asyncio.run(self._episode(seed, replies, "stop"))
        except Exception as error:
            return f"the episode failed: {type(error).__name__}: {error}"[:300], 0.0
        if episode.score is not None and episode.score.failed:
            return f"the score failed: {episode.score.failure}"[:300], 0.0
        for total in episode.totals:
            if not math.isfinite(total) or abs(total) > self.max_reward:
                return f"reward {total:g}, expected a finite number of at most {self.max_reward:g}", 0.0
        return "", max(episode.totals, default=0.0)

    def _forms(self, trick: Trick, opening: Opening, canary: str) -> Iterator[tuple[str, list[str | Reply]]]:
        """Replies of each form of a trick, with the form's name."""
        for number, text in enumerate(trick.texts):
            yield f"text {number + 1}", [text, text]
        for language, source in trick.programs:
            program = source.replace("CANARY", canary)
            yield f"block of {language}", [f"```{language}\n{program}```", ""]
            if calls := _calls(opening, program):
                yield f"tool calls with {language}", [*calls, ""]
        for text in trick.texts:
            if calls := _calls(opening, text):
                yield "tool calls with text", [*calls, ""]


def _write(sink: Any, line: Mapping[str, Any]) -> None:
    sink.write(json.dumps(line) + "\n")
    sink.flush()


def _calls(opening: Opening, text: str) -> list[Reply]:
    """A call of each tool, with `text` in the place of every parameter that is a text."""
    calls = []
    for tool in opening.tools:
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties") or {}
        keys = [key for key, value in properties.items() if value.get("type", "string") == "string"]
        called = {"name": function["name"], "arguments": json.dumps(dict.fromkeys(keys, text))}
        calls.append(Reply(text="", tool_calls=[{"id": "call00000", "type": "function", "function": called}]))
    return calls


MODULES = (builtins, json, math, os, random, time)


def _state() -> dict[str, Any]:
    """Values of this process that a reply must not change, by name."""
    state: dict[str, Any] = {f"os.environ[{key!r}]": value for key, value in os.environ.items()}
    state["the working directory"] = os.getcwd()
    state["sys.path"] = tuple(sys.path)
    for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
        state[f"the handler of {number.name}"] = signal.getsignal(number)
    for module in MODULES:
        state |= {f"{module.__name__}.{name}": value for name, value in vars(module).items() if callable(value)}
    return state


def _changes(before: Mapping[str, Any]) -> list[str]:
    now = _state()
    return [name for name, value in before.items() if now.get(name) is not value and now.get(name) != value]


def _left() -> list[str]:
    """Processes that an episode left."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # none, and this process would be the parent of what a child left
        return []
    end = time.time() + LEFT_S
    while children := psutil.Process().children(recursive=True):
        living = []
        for child in children:
            with suppress(psutil.Error):
                if child.status() == psutil.STATUS_ZOMBIE:
                    with suppress(ChildProcessError):
                        os.waitpid(child.pid, os.WNOHANG)
                else:
                    living.append(" ".join(child.cmdline())[:60] or child.name())
        if not living:
            return []
        if time.time() > end:
            return living
        time.sleep(0.02)
    return []


# -- `roll-core envs test` ---------------------------------------------------------------------------------------------


class AnyEnvironment(EnvironmentIntegrity, EnvironmentConformance):
    """An environment of which no solution is known: its replies are empty."""

    varies = False
    timeout_s = 120.0
    target = ""
    options: ClassVar[Mapping[str, Any]] = {}

    def create(self) -> Environment:
        """A new environment with the options of the command line."""
        cls = load_class(self.target, Environment, owner=self.name)  # type: ignore[type-abstract]
        return cls(**self.options)

    def replies(self, seed: int) -> Sequence[str]:
        """Empty replies, until the episode ends."""
        return [""] * self.max_turns

    def test_an_oracle_ends_the_episode_with_a_reward(self) -> None:
        """Skip the test."""
        pytest.skip("no solution is known: write an EnvironmentConformance with replies")


def environment_suite(**attributes: Any) -> type:
    """Tests of an environment: its `target`, `options`, `task` and `name`."""
    return type("TestEnvironment", (AnyEnvironment,), {**attributes, "__module__": __name__})


def test_environment(
    name: str, target: str, options: Mapping[str, Any], task: Mapping[str, Any], expression: str
) -> int:
    """Test an environment with pytest in a child process. Returns 1 if a test fails, otherwise 0."""
    attributes = repr({"name": name, "target": target, "options": dict(options), "task": dict(task)})
    text = "from roll_testing.integrity import environment_suite\n\nTestEnvironment = environment_suite"
    return run_tests(f"{text}(**{attributes})\n", expression)
