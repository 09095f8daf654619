"""What pipelines may rely on, beyond the conformance kit, of both executors. One Ray instance serves the module."""

import asyncio
import math
import os
import re
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll_core.builtin.cpu import CpuPlatform
from roll_core.errors import (
    GuardTrippedError,
    PlacementError,
    PluginLoadError,
    UnsupportedError,
    WorkerDiedError,
    WorkerError,
    WorkerHungError,
    WorkerTimeoutError,
)
from roll_core.runtime.cluster.executors.base import Executor, GroupSpec, Place, WorkerCall, WorkerGroup
from roll_core.runtime.cluster.executors.local import LocalExecutor
from roll_core.runtime.cluster.placement import place_roles
from roll_core.spec.config import RewardConfig, TrainWorkerConfig
from roll_executor_ray import worker as ray_worker
from roll_executor_ray.executor import RayExecutor
from roll_testing import ExecutorConformance
from roll_testing.errors import mentions, raises_error

HERE = str(Path(__file__).parent)
RANKS = 2
ON_RAY = (pytest.mark.ray, pytest.mark.slow(ci=True))
EXECUTORS: dict[str, type[Executor]] = {"local": LocalExecutor, "ray": RayExecutor}
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def places(ranks: int = RANKS) -> tuple[Place, ...]:
    """Workers without slots: both executors take several of them."""
    return place_roles({"rewards.r": RewardConfig(reward="r", world_size=ranks)}, CpuPlatform(), 1)["rewards.r"]


def spec(role: str = "reward", ranks: int = RANKS, target: str = "executor_workers:Recorder", **more: Any) -> GroupSpec:
    return GroupSpec(role=role, kind="reward", target=target, places=places(ranks), timeout_s=60, **more)


async def ended(executor: Executor) -> bool:
    """True if an exit ends the run."""
    done, pending = await asyncio.wait([asyncio.ensure_future(executor.watch())], timeout=0.1)
    for task in pending:
        task.cancel()
    return bool(done)


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=ON_RAY)])
def started(request: pytest.FixtureRequest) -> Iterator[tuple[str, Run, WorkerGroup]]:
    """The executor's name, a way to run coroutines on its event loop, and a group of two workers."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.syspath_prepend(HERE)
        executor = EXECUTORS[request.param](CpuPlatform(), 2)
        groups = runner.run(executor.start([spec(args={"greeting": "good day"})]))
        yield request.param, runner.run, groups["reward"]
        runner.run(executor.close())


@pytest.fixture
def run(started: tuple[str, Run, WorkerGroup]) -> Run:
    return started[1]


@pytest.fixture
def group(started: tuple[str, Run, WorkerGroup]) -> WorkerGroup:
    return started[2]


@pytest.fixture
def another(started: tuple[str, Run, WorkerGroup]) -> Executor:
    """A second executor of the same kind; with Ray it joins the instance of the first."""
    return EXECUTORS[started[0]](CpuPlatform(), 2)


class TestLocal(ExecutorConformance):
    """The Ray executor's is in its package."""

    name = "local"


# -- calls


def test_a_call_of_each_with_too_few_arguments_is_refused(run: Run, group: WorkerGroup) -> None:
    with raises_error(ValueError, "reward.greet", "1", "2"):
        run(WorkerCall(group, "greet").each([("Ann",)]))


def test_keywords_of_a_call_are_refused_instead_of_dropped(run: Run, group: WorkerGroup) -> None:
    call: WorkerCall[..., Any] = WorkerCall(group, "wait_on_rank")
    for begin in (lambda: run(call.at(0, 1, seconds=0.0)), lambda: run(call.all(1, seconds=0.0))):
        with raises_error(TypeError, "seconds"):
            begin()
    with raises_error(TypeError, "seconds"):
        call.args(1, seconds=0.0)


def test_arrays_arrive_equal_and_writable(run: Run, group: WorkerGroup) -> None:
    sent = {"tokens": np.arange(200_000), "small": np.ones(3, np.float32), "text": "ünï", "none": None}
    for received in run(WorkerCall(group, "echo").all(sent)):
        np.testing.assert_array_equal(received["tokens"], sent["tokens"])
        assert received["tokens"].flags.writeable
        assert received["small"].dtype == np.float32
        assert (received["text"], received["none"]) == ("ünï", None)


def test_local_workers_get_and_give_the_very_objects(started: tuple[str, Run, WorkerGroup]) -> None:
    name, run, group = started
    sent = np.zeros(3)
    assert (run(WorkerCall(group, "echo").all(sent))[0] is sent) == (name == "local")


# -- errors


def test_guard_that_trips_in_a_worker_keeps_its_id(run: Run, group: WorkerGroup) -> None:
    with raises_error(GuardTrippedError, "reward rank 0") as caught:
        run(WorkerCall(group, "trip").at(0))
    assert caught.value.guard == "weights-unchanged"


def test_any_other_error_names_role_host_and_keeps_the_trace(run: Run, group: WorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        run(WorkerCall(group, "divide").at(1))
    error = caught.value
    assert (error.role, error.rank, error.host, error.method) == ("reward", 1, group.members[1].host, "divide")
    assert mentions(str(error), "ZeroDivisionError")
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "return 1 / 0" in error.trace


def test_errors_of_async_methods_are_reported_alike(run: Run, group: WorkerGroup) -> None:
    with raises_error(WorkerError, "reward rank 0", "fail_async", "KeyError", "'lost'"):
        run(WorkerCall(group, "fail_async").at(0))


def test_unpicklable_exception_keeps_its_message(run: Run, group: WorkerGroup) -> None:
    with raises_error(WorkerError, "cannot_travel", "CannotTravel"):
        run(WorkerCall(group, "cannot_travel").at(0))


@pytest.mark.parametrize("method", ["exit", "exit_async"])
def test_exit_in_a_worker_is_an_error_and_ends_nothing(run: Run, group: WorkerGroup, method: str) -> None:
    with raises_error(WorkerError, "SystemExit", "3"):
        run(WorkerCall(group, method).at(0))
    assert run(WorkerCall(group, "greet").at(0, "Ann")) == "good day Ann from 0"


def test_deadline_names_the_ranks_that_did_not_answer(run: Run, group: WorkerGroup) -> None:
    with raises_error(WorkerTimeoutError, "wait_on_rank", "2", "rank 1") as caught:
        run(WorkerCall(group, "wait_on_rank", 2).all(1, 6.0))
    assert "in wait_on_rank" in caught.value.trace
    assert run(WorkerCall(group, "wait_on_rank").all(0, 0.0)) == ["done", "done"]


# -- killing


def test_killed_worker_error_names_cause_and_stack(
    run: Run, started: tuple[str, Run, WorkerGroup], another: Executor
) -> None:
    async def hang_and_kill() -> None:
        async with another:
            group = (await another.start([spec("engine", survives="while_others_live")]))["engine"]
            hanging = asyncio.ensure_future(WorkerCall(group, "wait_forever", math.inf).at(1))
            await WorkerCall(group, "until_waiting").at(1)
            death = await group.kill(1, "no heartbeat")
            assert re.fullmatch(r"engine rank 1 on \S+ .*: no heartbeat", str(death))
            assert "engine[1].wait_forever:" in death.trace
            with raises_error(WorkerHungError, "engine rank 1"):
                await WorkerCall(group, "echo").at(1, 1)
            if started[0] == "local":  # whose threads cannot be killed: nothing of the role is used any more
                hanging.cancel()
                with raises_error(WorkerHungError, "rank 1"):
                    await WorkerCall(group, "echo").at(0, 1)
                return
            with raises_error(WorkerHungError, "engine rank 1"):
                await hanging
            while Path(f"/proc/{group.members[1].pid}").exists():
                await asyncio.sleep(0.05)
            assert group.lost == {1}
            assert await WorkerCall(group, "echo").all(2) == [2]
            await group.replace(1)
            assert await WorkerCall(group, "echo").all(3) == [3, 3]

    run(hang_and_kill())


# -- starting and closing


def test_worker_class_that_does_not_exist_is_named(run: Run, another: Executor) -> None:
    with raises_error(PluginLoadError, "reward rank 0", "executor_workers", "'Nobody'"):
        run(another.start([spec(ranks=1, target="executor_workers:Nobody")]))


def test_variables_of_a_role_are_there_and_gone_afterwards(run: Run, another: Executor) -> None:
    async def see() -> list[list[str | None]]:
        async with another:
            groups = await another.start([spec(env={"ROLL_TEST_COLOUR": "blue"})])
            return await WorkerCall(groups["reward"], "environment").all("ROLL_TEST_COLOUR")

    assert run(see()) == [["blue"], ["blue"]]
    assert "ROLL_TEST_COLOUR" not in os.environ


def test_roles_that_contradict_each_other_cannot_share_a_process() -> None:
    executor = LocalExecutor(CpuPlatform(), 2)
    one, two = spec("one", env={"COLOUR": "blue"}), spec("two", env={"COLOUR": "red"})
    with raises_error(UnsupportedError, "COLOUR=blue", "COLOUR=red"):
        asyncio.run(executor.start([one, two]))
    assert "COLOUR" not in os.environ


def test_local_executor_has_the_slots_of_this_host_only() -> None:
    class TwoDevices(CpuPlatform):
        slots_share_cores = False

        def device_count(self) -> int:
            return 2

    where = place_roles({"a": TrainWorkerConfig(device_mapping=(3,))}, TwoDevices(), 8)["a"]
    executor = LocalExecutor(TwoDevices(), 8)
    wanted = GroupSpec(role="actor_train", kind="train", target="executor_workers:Recorder", places=where)
    with raises_error(PlacementError, "actor_train", "slot 3", "2", "0", "1"):
        asyncio.run(executor.start([wanted]))


def test_local_executor_refuses_two_workers_that_train() -> None:
    executor = LocalExecutor(CpuPlatform(), 2)
    two = GroupSpec(role="actor_train", kind="train", target="executor_workers:Recorder", places=places(2))
    with raises_error(UnsupportedError, "actor_train", "2"):
        asyncio.run(executor.start([two]))


# -- Ray only: processes of their own


only_ray = pytest.mark.parametrize("started", [pytest.param("ray", marks=ON_RAY)], indirect=True)


@only_ray
def test_ray_workers_receive_role_and_rank(run: Run, group: WorkerGroup) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WORKER_NAME", "CLUSTER_NAME", "MASTER_ADDR", "OMP_NUM_THREADS")
    assert run(WorkerCall(group, "environment").all(*names)) == [
        ["0", "2", "0", "reward-0", "reward", "127.0.0.1", "1"],
        ["1", "2", "1", "reward-1", "reward", "127.0.0.1", "1"],
    ]
    (_, first), (_, second) = run(WorkerCall(group, "where").all())
    assert first == second
    assert first.master_port > 0
    assert run(WorkerCall(group, "environment").all("MASTER_PORT")) == [[str(first.master_port)]] * 2


@only_ray
def test_result_that_cannot_be_sent_is_an_error_of_its_call(run: Run, group: WorkerGroup) -> None:
    with raises_error(WorkerError, "unsendable"):
        run(WorkerCall(group, "unsendable").at(0))


@only_ray
def test_arguments_that_cannot_be_sent_are_refused(run: Run, group: WorkerGroup) -> None:
    with raises_error(UnsupportedError, "reward.echo"):
        run(WorkerCall(group, "echo").all(each for each in ()))


@only_ray
@pytest.mark.parametrize("pending", ["own call", "another role's call", "no call"])
def test_killed_worker_is_noticed_and_named(run: Run, another: Executor, pending: str) -> None:
    async def kill_one() -> None:
        async with another:
            groups = await another.start([spec("victims"), spec("others", ranks=1)])
            victim = groups["victims"].members[1]
            waiting = {
                "own call": lambda: WorkerCall(groups["victims"], "sleep").all(60),
                "another role's call": lambda: WorkerCall(groups["others"], "wait_forever").all(),
                "no call": another.watch,
            }[pending]()
            task = asyncio.ensure_future(waiting)
            await asyncio.sleep(0.2)
            os.kill(victim.pid, signal.SIGKILL)
            with raises_error(WorkerDiedError, "victims rank 1", victim.host, victim.pid) as caught:
                await asyncio.wait_for(task, 30)
            assert caught.value.method == ("sleep" if pending == "own call" else "")
            with raises_error(WorkerDiedError, "victims rank 1"):
                await asyncio.wait_for(another.watch(), 30)
            with raises_error(WorkerDiedError, "victims rank 1"):
                await WorkerCall(groups["others"], "greet").all("Ann")

    run(kill_one())


@only_ray
def test_worker_with_dead_engine_counts_as_dead_and_is_replaced(run: Run, another: Executor) -> None:
    async def lose_one() -> None:
        async with another:
            group = (await another.start([spec(survives="while_others_live")]))["reward"]
            with raises_error(WorkerDiedError, "reward rank 1", "lose_engine"):
                await WorkerCall(group, "lose_engine").at(1)
            assert not await ended(another)
            assert group.lost == {1}
            assert await WorkerCall(group, "greet").all("Ann") == ["hello Ann from 0"]
            await group.replace(1)
            assert group.lost == frozenset()
            assert await WorkerCall(group, "greet").all("Ann") == ["hello Ann from 0", "hello Ann from 1"]

    run(lose_one())


@only_ray
def test_last_worker_of_a_surviving_role_can_be_replaced(run: Run, another: Executor) -> None:
    async def lose_the_only_one() -> None:
        async with another:
            group = (await another.start([spec("engine", ranks=1, survives="always")]))["engine"]
            hanging = asyncio.ensure_future(WorkerCall(group, "wait_forever").all())
            await asyncio.sleep(0.2)
            os.kill(group.members[0].pid, signal.SIGKILL)
            with raises_error(WorkerDiedError, "engine rank 0"):
                await asyncio.wait_for(hanging, 60)
            assert not await ended(another)
            assert group.lost == {0}
            assert group.survives_all
            assert await WorkerCall(group, "greet").all("Ann") == []
            with raises_error(WorkerDiedError, "engine rank 0"):
                await WorkerCall(group, "greet").each([("Ann",)])
            await group.replace(0)
            assert await WorkerCall(group, "greet").all("Ann") == ["hello Ann from 0"]

    run(lose_the_only_one())


@only_ray
def test_worker_behind_a_network_gap_is_killed_if_group_survives(
    run: Run, another: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray_worker, "EXIT_NOTICE_S", 0.1)

    async def lose_a_call() -> None:
        async with another:
            group: Any = (await another.start([spec(survives="while_others_live")]))["reward"]
            behind = group._workers[1]
            asked = [asyncio.ensure_future(WorkerCall(group, "wait_forever", 60).at(1)) for _ in range(2)]
            await WorkerCall(group, "greet").at(1, "Ann")
            error = ray.exceptions.ActorUnavailableError("no route to host", None)
            behind._call_lost(next(iter(behind._pending)), error)
            for each in asked:
                with raises_error(WorkerDiedError, "reward rank 1", "route"):
                    await each
            assert not await ended(another)
            assert group.lost == {1}
            await group.replace(1)
            assert await WorkerCall(group, "greet").all("Ann") == ["hello Ann from 0", "hello Ann from 1"]

    run(lose_a_call())


@only_ray
def test_crash_is_distinguished_from_a_kill_and_located(run: Run, another: Executor) -> None:
    async def crash() -> None:
        async with another:
            groups = await another.start([spec(ranks=1)])
            with raises_error(WorkerDiedError, "crash") as caught:
                await WorkerCall(groups["reward"], "crash").all()
            assert "executor_workers.py" in caught.value.trace

    run(crash())


@only_ray
@pytest.mark.slow
def test_collectives_fail_with_the_cause_and_not_with_its_echo(run: Run, another: Executor) -> None:
    async def reduce() -> None:
        async with another:
            pair = spec("actor_train", target="executor_workers:Collective")
            group = (await another.start([pair]))["actor_train"]
            assert await WorkerCall(group, "sum_of_ranks").all() == [3, 3]
            with raises_error(WorkerDiedError, "actor_train rank 1", "die_before_reduce"):
                await WorkerCall(group, "die_before_reduce").all(1)

    run(reduce())


def test_unreachable_ray_address_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        executor = RayExecutor(CpuPlatform(), 2)
        with raises_error(PlacementError, "RAY_ADDRESS", address):
            asyncio.run(executor.start([]))
