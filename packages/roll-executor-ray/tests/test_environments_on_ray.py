"""Roles with a Python environment of their own, on Ray, beside roles that have none."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from other_pythons import environment_that_shows_all, other_minor_version

from roll_core.builtin.cpu import CpuPlatform
from roll_core.errors import CorruptTensorError, PythonEnvironmentError, UnsupportedError, WorkerDiedError, WorkerError
from roll_core.runtime.cluster.executors.base import GroupSpec, WorkerCall, WorkerGroup
from roll_core.runtime.cluster.placement import place_roles
from roll_core.spec.config import EnvironmentConfig, RewardConfig
from roll_core.spec.diagnostics import RoleEnvironment
from roll_executor_ray.executor import RayExecutor
from roll_testing.errors import raises_error

pytestmark = [pytest.mark.ray, pytest.mark.slow(ci=True)]
HERE = str(Path(__file__).parents[3] / "tests" / "executors")
Run = Callable[[Awaitable[Any]], Any]


def spec(role: str, python: Path | None, ranks: int = 1, **args: Any) -> GroupSpec:
    places = place_roles({"rewards.r": RewardConfig(reward="r", world_size=ranks)}, CpuPlatform(), 1)["rewards.r"]
    environment = RoleEnvironment(config=EnvironmentConfig(python=str(python)), package="roll-core") if python else None
    return GroupSpec(
        role=role, kind="reward", target="executor_workers:Recorder", places=places, timeout_s=60, args=args,
        env={"GREETING": role}, environment=environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Run, dict[str, WorkerGroup], Path]]:
    python = environment_that_shows_all(tmp_path_factory.mktemp("environment"))
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.syspath_prepend(HERE)
        executor = RayExecutor(CpuPlatform(), 2)
        groups = runner.run(executor.start([spec("plain", None), spec("foreign", python, 2, greeting="hi")]))
        yield executor, runner.run, groups, python
        runner.run(executor.close())


def test_both_kinds_of_workers_run_in_their_interpreters(started: Any) -> None:
    executor, run, groups, python = started
    assert run(WorkerCall(groups["foreign"], "greet").all("Ann")) == ["hi Ann from 0", "hi Ann from 1"]
    assert run(WorkerCall(groups["plain"], "greet").all("Ann")) == ["hello Ann from 0"]
    pids = [member.pid for member in groups["foreign"].members]
    assert run(WorkerCall(groups["foreign"], "process").all()) == pids
    assert {psutil.Process(pid).cmdline()[0] for pid in pids} == {str(python)}
    assert list(executor.fingerprints) == ["foreign"]
    assert executor.fingerprints["foreign"]["executable"] == str(python)
    assert executor.fingerprints["foreign"]["torch"] == version("torch")


def test_worker_knows_its_rank_and_variables(started: Any) -> None:
    _, run, groups, _ = started
    found = run(WorkerCall(groups["foreign"], "environment").all("RANK", "WORLD_SIZE", "GREETING", "PYTHONPATH"))
    assert found == [["0", "2", "foreign", None], ["1", "2", "foreign", None]]


def test_errors_name_role_and_rank_and_tensors_are_refused(started: Any) -> None:
    import torch

    _, run, groups, _ = started
    with raises_error(CorruptTensorError, "foreign rank 0", "layer.0.weight"):
        run(WorkerCall(groups["foreign"], "corrupt").all())
    with raises_error(WorkerError, "foreign rank 1", "ZeroDivisionError"):
        run(WorkerCall(groups["foreign"], "divide").at(1))
    with raises_error(UnsupportedError, "foreign.echo", "torch.Tensor"):
        run(WorkerCall(groups["foreign"], "echo").all(torch.zeros(1)))


def test_a_missing_environment_fails_the_start_with_its_command(started: Any, tmp_path: Path) -> None:
    _, run, _, _ = started
    another = RayExecutor(CpuPlatform(), 2)
    with raises_error(PythonEnvironmentError, "actor_infer", tmp_path, "/no"):
        run(another.start([spec("actor_infer", tmp_path / "no")]))


def test_a_killed_process_is_a_dead_worker(started: Any) -> None:
    """The last test of the module: after a death every call raises."""
    _, run, groups, _ = started
    group = groups["foreign"]

    async def kill() -> None:
        waiting = asyncio.ensure_future(WorkerCall(group, "wait_forever").all())
        await WorkerCall(group, "greet").all("Ann")
        os.kill(group.members[1].pid, signal.SIGKILL)
        await waiting

    pid = group.members[1].pid
    with raises_error(WorkerDiedError, "foreign rank 1", pid, "SIGKILL"):
        run(kill())


@pytest.mark.timeout(600)
def test_another_minor_version_of_python_serves_a_role(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """uv installs the packages of the role for that Python, from the index."""
    python = other_minor_version()
    if python is None:
        pytest.skip("no later minor version of Python here")
    monkeypatch.setenv("ROLL_ENVIRONMENTS_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(HERE)
    config = EnvironmentConfig(packages=["numpy"], python=python)
    role = replace(spec("foreign", None, 2), environment=RoleEnvironment(config=config, package="roll-core"))
    values = {
        "array": np.arange(3, dtype=np.int32),
        "when": datetime(2026, 11, 29, tzinfo=UTC),
        "text": "é",
        "none": None,
    }
    executor = RayExecutor(CpuPlatform(), 2)
    with asyncio.Runner() as runner:
        try:
            groups = runner.run(executor.start([role]))
            for found in runner.run(WorkerCall(groups["foreign"], "echo").all(values)):
                assert str(found) == str(values)
                assert found["array"].dtype == np.int32
            with pytest.raises(WorkerError):
                runner.run(WorkerCall(groups["foreign"], "no_such_method").all())
        finally:
            runner.run(executor.close())
    assert executor.fingerprints["foreign"]["python"] > f"3.{sys.version_info.minor + 1}"
