"""Environments inline, in threads and in processes: deadlines, failures that name the package, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll_core.errors import EnvironmentFailure
from roll_core.spec.environment import Reply
from roll_core.types import Reward
from roll_pipeline_agentic import environment_process
from roll_pipeline_agentic.config import AgenticEnvConfig
from roll_pipeline_agentic.hosting import EnvironmentHost
from roll_testing.errors import mentions, raises_error

sys.path.insert(0, str(Path(__file__).parent))
import wrong_environments as wrong


def host(
    isolation: Any, cls: Any = wrong.Echo, *, timeout_s: float = 5.0, concurrency: int = 0, **options: Any
) -> EnvironmentHost:
    config = AgenticEnvConfig(
        environment="x", setup_timeout_s=timeout_s, step_timeout_s=timeout_s, score_timeout_s=timeout_s
    )
    return EnvironmentHost(
        "x",
        config,
        target=f"wrong_environments:{cls.__name__}",
        options=options,
        owner="environment 'x' of acme 1.0",
        isolation=isolation,
        concurrency=concurrency,
        create=partial(cls, **options),
    )


async def episode(of: EnvironmentHost) -> float:
    async with of.slot(), of.environment() as environment:
        await environment.reset({}, 0)
        total = 0.0
        while True:
            turn = await environment.step(Reply(text="7"))
            total += turn.reward or 0.0
            if turn.done:
                break
        score = await environment.score()
        return total + ((score.value or 0.0) if score else 0.0)


async def closed(of: EnvironmentHost, *episodes: Any) -> list[Any]:
    try:
        return await asyncio.gather(*episodes, return_exceptions=True)
    finally:
        await of.close()


@pytest.fixture(autouse=True)
def children_import_wrong(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    yield
    left = [
        each for each in psutil.Process().children(recursive=True) if "environment_process" in " ".join(each.cmdline())
    ]
    assert not left


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_blocking_environments_run_beside_each_other(isolation: str) -> None:
    async def run() -> list[Any]:
        of = host(isolation)
        return await closed(of, *(episode(of) for _ in range(3)))

    assert asyncio.run(run()) == [1.0, 1.0, 1.0]


CALLS = [("thread", at, how) for at in ("init", "reset", "step", "score") for how in ("raise", "exit")]


@pytest.mark.parametrize(
    ("isolation", "at", "how"), [*CALLS, ("process", "init", "raise"), ("process", "step", "exit")]
)
def test_an_exception_is_a_failure_of_the_episode(isolation: str, at: str, how: str) -> None:
    async def run() -> list[Any]:
        of = host(isolation, at=at, how=how)
        return await closed(of, episode(of))

    (failure,) = asyncio.run(run())
    assert isinstance(failure, EnvironmentFailure)
    assert "acme" in str(failure)
    assert "custom_envs.x" in str(failure)


def test_processes_and_threads_describe_an_error_alike() -> None:
    async def run(isolation: str) -> Any:
        of = host(isolation, at="step", how="raise")
        (failure,) = await closed(of, episode(of))
        return failure

    in_process, in_thread = (str(asyncio.run(run(each))) for each in ("process", "thread"))
    assert in_process == in_thread
    assert "RuntimeError" not in in_process


RESETS = ["tools are None", "tools are texts", "players are a text", "first state is a tuple", "no UTF-8", "no JSON"]
STEPS = ["type", "nan", "role", "silent", "huge reward", "metrics are None", "a metric is None", "rewards are None"]
SCORES = ["failed score", "nan in detail", "list in detail", "None in detail"]
INVALID = {
    **dict.fromkeys(RESETS, "reset"),
    **dict.fromkeys([*STEPS, "state is a tuple"], "step"),
    **dict.fromkeys(SCORES, "score"),
}


@pytest.mark.parametrize(("isolation", "how"), [*(("thread", how) for how in INVALID), ("process", "state is a tuple")])
def test_an_invalid_result_is_a_failure_of_the_episode(isolation: str, how: str) -> None:
    async def run() -> list[Any]:
        of = host(isolation, how=how)
        return await closed(of, episode(of))

    (failure,) = asyncio.run(run())
    assert isinstance(failure, EnvironmentFailure)
    assert mentions(str(failure), "custom_envs.x", "acme", INVALID[how])


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_timeout_of_the_environment_is_not_the_deadline(isolation: str) -> None:
    async def run() -> list[Any]:
        of = host(isolation, how="own timeout")
        return await closed(of, episode(of))

    (failure,) = asyncio.run(run())
    assert isinstance(failure, EnvironmentFailure)
    assert mentions(str(failure), "step", "TimeoutError")


def test_a_score_may_have_numbers_and_texts_as_details() -> None:
    async def run() -> list[Any]:
        of = host("thread", how="details")
        return await closed(of, episode(of))

    assert asyncio.run(run()) == [2.0]


@pytest.mark.parametrize(
    "reward",
    [
        Reward(value=None, failure="the judge is away"),
        Reward(value=None),
        Reward(value=float("inf")),
        Reward(value=0.5, detail={"bleu": float("nan")}),
    ],
)
def test_an_agents_own_reward_is_checked_like_an_environments(reward: Reward) -> None:
    with raises_error(EnvironmentFailure, "custom_envs.x", "acme", "run"):
        host("thread").check_reward("run", reward)


def test_an_error_in_close_changes_nothing() -> None:
    async def run() -> list[Any]:
        of = host("thread", at="close", how="raise")
        return await closed(of, episode(of))

    assert asyncio.run(run()) == [1.0]


@pytest.mark.parametrize(
    ("isolation", "cls"), [("inline", wrong.Slow), ("thread", wrong.Echo), ("process", wrong.Echo)]
)
def test_a_hanging_call_is_stopped_at_its_deadline(isolation: str, cls: Any) -> None:
    options = {} if cls is wrong.Slow else {"at": "step", "how": "hang"}

    async def run() -> list[Any]:
        of = host(isolation, cls, timeout_s=0.3, **options)
        return await closed(of, episode(of), episode(of))

    begin = time.monotonic()
    failures = asyncio.run(run())
    assert all(isinstance(each, EnvironmentFailure) for each in failures)
    assert time.monotonic() - begin < 60


STAGES = [("setup", "init"), ("setup", "reset"), ("step", "step"), ("score", "score")]
SLOW_START = ("process", "reset")


@pytest.mark.parametrize(
    ("isolation", "stage", "at"),
    # A process takes longer than the deadline to start, so its `reset` has none of 0.2 s to exceed.
    [
        (isolation, *each)
        for isolation in ("thread", "process")
        for each in STAGES
        if (isolation, each[1]) != SLOW_START
    ],
)
def test_stages_have_their_own_deadlines(isolation: str, stage: str, at: str) -> None:
    """The stage that hangs is stopped after its own seconds; the others have an hour."""

    async def run() -> list[Any]:
        of = host(isolation, at=at, how="hang")
        keys = {f"{each}_timeout_s": 3600.0 for each in ("setup", "step", "score")} | {f"{stage}_timeout_s": 0.2}
        of.config = of.config.model_copy(update=keys)
        async with asyncio.timeout(30):
            return await closed(of, episode(of))

    (failure,) = asyncio.run(run())
    assert isinstance(failure, EnvironmentFailure)
    assert mentions(str(failure), f"__{at}__" if at == "init" else at, "0.2 s")


def test_a_process_that_exits_is_replaced(tmp_path: Path) -> None:
    async def run() -> list[Any]:
        dying, fine = host("process", at="step", how="die"), host("process", concurrency=1, log=str(tmp_path / "log"))
        first = await closed(dying, episode(dying))
        return first + await closed(fine, *(episode(fine) for _ in range(3)))

    failure, *rest = asyncio.run(run())
    assert isinstance(failure, EnvironmentFailure)
    assert rest == [1.0, 1.0, 1.0]
    # One process served the three episodes, one after the other.
    calls = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [name for name, _ in calls].count("init") == 3
    assert len({pid for _, pid in calls}) == 1
    assert str(os.getpid()) not in {pid for _, pid in calls}


def test_a_process_ends_with_its_driver_also_during_a_call() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", environment_process.__file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    with ours:
        options = {"at": "step", "how": "hang"}
        for request in (
            {"create": "wrong_environments:Echo", "options": options},
            {"call": "reset", "arguments": [{}, 0]},
        ):
            ours.sendall(json.dumps(request).encode() + b"\n")
            assert "error" not in json.loads(ours.recv(10_000))
        ours.sendall(json.dumps({"call": "step", "arguments": [{"text": "1"}]}).encode() + b"\n")
    assert process.wait(timeout=30) == 0


DRIVER = """
import json, sys, time
from roll_pipeline_agentic.environment_process import start_process

process, connection = start_process()
options = {"at": "reset", "how": "child", "log": sys.argv[1]}
for request in (
    {"create": "wrong_environments:Echo", "options": options},
    {"call": "reset", "arguments": [{}, 0]},
):
    connection.sendall(json.dumps(request).encode() + b"\\n")
time.sleep(600)
"""


def test_processes_of_an_environment_end_with_a_killed_driver(tmp_path: Path) -> None:
    log = tmp_path / "log"
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(log)], env={**os.environ, "PYTHONPATH": path})
    end = time.monotonic() + 60
    # The file has first the lines of the log, then the child's id alone.
    while not (log.exists() and log.read_text().isdecimal()):
        assert time.monotonic() < end
        time.sleep(0.02)
    child = psutil.Process(int(log.read_text()))
    driver.kill()
    driver.wait()
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_cancelled_episode_stops_the_call_of_its_environment(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def run() -> None:
        of = host("process", at="step", how="hang", log=str(log))
        async with asyncio.timeout(30):
            async with of.environment() as environment:
                await environment.reset({}, 0)
                task = asyncio.ensure_future(environment.step(Reply(text="7")))
                while "step" not in log.read_text():
                    await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await of.close()

    asyncio.run(run())
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text().split()[-1]), 0)


def test_an_instance_has_one_episode() -> None:
    async def run() -> None:
        of = host("thread")
        async with of.environment() as environment:
            await environment.reset({}, 0)
            with pytest.raises(AssertionError):
                await environment.reset({}, 0)
        await of.close()

    asyncio.run(run())


@pytest.mark.parametrize("isolation", ["inline", "thread", "process"])
@pytest.mark.parametrize("number", [1, 3])
def test_concurrency_is_reached_and_never_exceeded(isolation: str, number: int, tmp_path: Path) -> None:
    """Each step waits until `number` episodes have begun, so fewer at the same time would never end."""
    cls = wrong.CountedInline if isolation == "inline" else wrong.Counted

    async def run() -> list[Any]:
        of = host(isolation, cls, timeout_s=60.0, concurrency=number, folder=str(tmp_path), number=number)
        return await closed(of, *(episode(of) for _ in range(3 * number)))

    most = asyncio.run(run())
    assert len(most) == 3 * number
    assert max(most) == number
