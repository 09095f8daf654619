"""Environments with `isolation: environment`: an interpreter of their own, whose packages the driver cannot import."""

from __future__ import annotations

import ast
import asyncio
import sys
import time
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from roll_core.api.files import FileCheck
from roll_core.config import load
from roll_core.errors import ConfigError, EnvironmentFailure, PluginLoadError
from roll_core.spec.environment import Reply
from roll_pipeline_agentic import environment_process
from roll_pipeline_agentic.config import AgenticEnvConfig
from roll_pipeline_agentic.hosting import EnvironmentHost

if TYPE_CHECKING:
    from conftest import AgenticRuns

WORDS = '''
import os
import subprocess
import sys
import time

import yaml  # the package of the same name in the driver is another one

from roll_core.spec.environment import Environment, Opening, Turn


NUMPY = [name for name in sys.modules if name == "numpy"]


class Words(Environment):
    reports_success = True

    def __init__(self, at="", how="", log=""):
        self.at, self.how, self.log = at, how, log
        self.fail("init")

    def fail(self, where):
        if where != self.at:
            return
        if self.log:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(self.log, "w") as file:
                file.write(f"{os.getpid()} {child.pid}")
        if self.how == "raise":
            raise ValueError("no such word")
        if self.how == "hang":
            time.sleep(600)
        if self.how == "kill":
            os.kill(os.getpid(), 9)

    def reset(self, task, seed):
        self.fail("reset")
        self.turns = 0
        path = os.environ.get("PYTHONPATH", "none")
        return Opening(messages=[{"role": "user", "content": f"{yaml.KIND} {path} {len(NUMPY)}"}])

    async def step(self, reply):
        self.fail("step")
        self.turns += 1
        metrics = {"success": float(len(reply.text) > 1)}
        return Turn(messages=[{"role": "user", "content": "on"}], reward=0.25, done=self.turns == 2, metrics=metrics)

    def score(self):
        self.fail("score")
        return 0.5


class Plain:
    """Knows nothing of ROLL."""

    def reset(self, task, seed):
        return {"messages": [{"role": "user", "content": str(seed)}]}

    def step(self, reply):
        return {"reward": float(len(reply.text)), "done": True, "metrics": {"valid": reply.parse_error is None}}

    def score(self):
        return {"value": 1.0, "detail": {"bonus": 1.0}}

    def close(self):
        pass


class WrongKey(Plain):
    def step(self, reply):
        return {"reward": 1.0, "finished": True}


class Incomplete:
    def reset(self, task, seed):
        pass
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interpreter of a bare virtual environment with two modules."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "words_of_acme.py").write_text(WORDS, encoding="utf-8")
    (packages / "yaml.py").write_text('KIND = "another yaml"\n', encoding="utf-8")
    return str(folder / "bin" / "python")


def host(python: str, cls: str = "Words", *, timeout_s: float = 10.0, **options: Any) -> EnvironmentHost:
    target = f"words_of_acme:{cls}"
    entry = AgenticEnvConfig(
        environment=target,
        env_config=options,
        python=python,
        setup_timeout_s=timeout_s,
        step_timeout_s=timeout_s,
        score_timeout_s=timeout_s,
    )
    return EnvironmentHost(
        "x", entry, target=target, options=options, owner="acme", isolation="process", concurrency=0, python=python
    )


async def episode(of: EnvironmentHost) -> tuple[str, float]:
    async with of.environment() as environment:
        opening = await environment.reset({"a": 1}, 7)
        total, done = 0.0, False
        while not done:
            turn = await environment.step(Reply(text="four"))
            total, done = total + (turn.reward or 0.0), turn.done
        score = await environment.score()
        return opening.messages[0]["content"], total + ((score.value or 0.0) if score else 0.0)


def results(of: EnvironmentHost, number: int = 1) -> list[Any]:
    async def run() -> list[Any]:
        try:
            return await asyncio.gather(*(episode(of) for _ in range(number)), return_exceptions=True)
        finally:
            await of.close()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def _no_process_is_left(python: str) -> Any:
    yield
    assert not [each for each in psutil.Process().children(recursive=True) if python in each.cmdline()]


def test_environment_uses_packages_of_its_interpreter(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/packages/of/the/driver")
    with pytest.raises(ModuleNotFoundError):
        __import__("words_of_acme")
    # The interpreter has none of the driver's packages; the contract needs no numpy there.
    assert results(host(python), 3) == [("another yaml none 0", 1.0)] * 3


def test_environment_needs_no_roll_package(python: str) -> None:
    assert results(host(python, "Plain")) == [("7", 5.0)]
    (failure,) = results(host(python, "WrongKey"))
    assert isinstance(failure, EnvironmentFailure)
    assert "finished" in str(failure)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("how", ["raise", "hang", "kill"])
@pytest.mark.parametrize("at", ["init", "reset", "step", "score"])
def test_a_failing_call_ends_its_episode_and_all_its_processes(python: str, tmp_path: Path, how: str, at: str) -> None:
    log = tmp_path / "pids"
    begin = time.monotonic()
    (failure,) = results(host(python, at=at, how=how, log=str(log), timeout_s=1.0 if how == "hang" else 10.0))
    assert isinstance(failure, EnvironmentFailure)
    assert {"raise": "no such word", "hang": "1 s", "kill": "SIGKILL"}[how] in str(failure)
    assert time.monotonic() - begin < 30
    pids = [int(pid) for pid in log.read_text().split()]
    while any(is_running(pid) for pid in pids):  # a killed process ends a moment later
        assert time.monotonic() - begin < 30
        time.sleep(0.01)


def test_a_process_that_was_killed_is_replaced(python: str) -> None:
    async def run() -> list[Any]:
        of = host(python)
        try:
            async with of.environment() as environment:
                await environment.reset({}, 7)
                (child,) = [each for each in psutil.Process().children() if each.cmdline()[0] == python]
                child.kill()
                with pytest.raises(EnvironmentFailure):
                    await environment.step(Reply(text="four"))
            return [await episode(of), await episode(of)]
        finally:
            await of.close()

    assert asyncio.run(run()) == [("another yaml none 0", 1.0)] * 2


def test_a_run_trains_on_it(runs: AgenticRuns, python: str) -> None:
    entry = {"environment": "words_of_acme:Words", "isolation": "environment", "python": python}
    result = runs.ok(runs.config(max_steps=1, prompt_length=128, custom_envs={"words": entry}))
    (line,) = runs.metrics(result)
    assert line["env/words/turns/mean"] == 2
    assert line["env/words/score/mean"] == 1.0
    assert 0 <= line["env/words/success"] <= 1


def problems(runs: AgenticRuns, **entry: Any) -> list[tuple[str, str]]:
    import yaml

    path = runs.folder / "mistake.yaml"
    path.write_text(yaml.safe_dump(runs.config(custom_envs={"words": entry})), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load(path, [], runs.registry, FileCheck())
    return [(each.code, each.key) for each in error.value.problems]


def test_mistakes_are_found_before_the_run(runs: AgenticRuns, python: str) -> None:
    words, at = "words_of_acme:Words", "custom_envs.words"
    not_executable = runs.folder / "python"
    not_executable.write_text("")
    wrong = [
        {"environment": words, "python": "/no/such/python"},
        {"environment": words, "python": str(not_executable)},
        {"environment": words, "python": "/bin/false"},
        {"environment": "no_such_module:Words", "python": python},
        {"environment": "words_of_acme:Missing", "python": python},
        {"environment": "words_of_acme:Incomplete", "python": python},
        {"environment": words, "python": python, "env_config": {"no_such_option": 1}},
    ]
    for entry in wrong:
        assert problems(runs, **entry) == [("ROLL-C040", f"{at}.python")], entry
    whole = [
        {"environment": words, "python": python, "isolation": "thread"},
        {"environment": "guess_number", "isolation": "environment"},
        {"agent": "command", "agent_config": {"command": ["true"]}, "python": python},
    ]
    for entry in whole:
        assert problems(runs, **entry) == [("ROLL-C014", at)], entry


def test_a_named_environment_is_looked_for_when_the_run_starts(runs: AgenticRuns, python: str) -> None:
    entry = {"environment": "guess_number", "env_config": {"high": 9}, "python": python}
    result = runs.run(runs.config(custom_envs={"words": entry}))
    assert isinstance(result.error, PluginLoadError)
    entry["python"] = sys.executable
    (line, *_) = runs.metrics(runs.ok(runs.config(exp_name="own", max_steps=1, custom_envs={"words": entry})))
    assert line["env/words/turns/max"] <= 3


def test_environment_process_needs_only_an_old_standard_library() -> None:
    tree = ast.parse(Path(environment_process.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        name
        for each in imports
        for name in ([alias.name for alias in each.names] if isinstance(each, ast.Import) else [each.module])
    }
    assert {str(name).partition(".")[0] for name in names} <= sys.stdlib_module_names
