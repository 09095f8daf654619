"""What pipelines may rely on, of both executors. One Ray instance serves the whole module."""

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
    CorruptTensorError,
    GuardTrippedError,
    PlacementError,
    PluginLoadError,
    UnsupportedError,
    WorkerDiedError,
    WorkerError,
    WorkerHungError,
    WorkerTimeoutError,
)
from roll_core.runtime.cluster.executors import make_executor
from roll_core.runtime.cluster.executors.base import Executor, GroupSpec, Place, WorkerGroup
from roll_core.runtime.cluster.placement import place_roles
from roll_core.spec.config import RewardConfig, TrainWorkerConfig
from roll_testing.errors import mentions, raises_error

HERE = str(Path(__file__).parent)
RANKS = 2
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def places(ranks: int = RANKS) -> tuple[Place, ...]:
    """Workers without slots: both executors take several of them."""
    return place_roles({"rewards.r": RewardConfig(reward="r", world_size=ranks)}, CpuPlatform())["rewards.r"]


def spec(role: str = "reward", ranks: int = RANKS, target: str = "executor_workers:Recorder", **more: Any) -> GroupSpec:
    return GroupSpec(role=role, kind="reward", target=target, places=places(ranks), timeout_s=60, **more)


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def started(request: pytest.FixtureRequest) -> Iterator[tuple[str, Run, WorkerGroup]]:
    """The executor's name, a way to run coroutines on its event loop, and a group of two workers."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.syspath_prepend(HERE)
        executor = make_executor(request.param, CpuPlatform(), slots_per_node=2)
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
    return make_executor(started[0], CpuPlatform(), slots_per_node=2)  # type: ignore[arg-type]


# -- calls


def test_call_reaches_every_rank_and_answers_by_rank(run: Run, group: WorkerGroup) -> None:
    assert run(group.call("greet", "Ann")) == ["good day Ann from 0", "good day Ann from 1"]


def test_call_each_gives_every_rank_its_own_arguments(run: Run, group: WorkerGroup) -> None:
    assert run(group.call_each("greet", [("Ann",), ("Bob",)])) == ["good day Ann from 0", "good day Bob from 1"]


def test_call_each_with_too_few_arguments_is_refused(run: Run, group: WorkerGroup) -> None:
    with raises_error(ValueError, "reward.greet", "1", "2"):
        run(group.call_each("greet", [("Ann",)]))


def test_call_rank_reaches_one(run: Run, group: WorkerGroup) -> None:
    assert run(group.call_rank(1, "greet", "Ann")) == "good day Ann from 1"


def test_workers_know_their_place_and_members_say_where_they_run(run: Run, group: WorkerGroup) -> None:
    found = run(group.call("where"))
    assert [place.rank for place, _ in found] == [0, 1]
    assert [member.rank for member in group.members] == [0, 1]
    assert [member.pid for member in group.members] == run(group.call("process"))


def test_sync_methods_run_on_the_thread_that_made_the_worker(run: Run, group: WorkerGroup) -> None:
    assert run(group.call("runs_where_it_was_made")) == [True, True]


def test_sync_methods_run_in_the_order_of_the_calls(run: Run, group: WorkerGroup) -> None:
    async def many() -> list[list[int]]:
        # Arguments of very different sizes travel differently; the order of the calls counts all the same.
        big = [np.zeros(300_000) if number % 3 == 0 else None for number in range(30)]
        await asyncio.gather(*[group.call("echo", each) for each in big], *[group.call("note", n) for n in range(30)])
        return await group.call("noted")

    assert run(many()) == [list(range(30))] * RANKS


def test_async_methods_overlap(run: Run, group: WorkerGroup) -> None:
    async def both() -> list[int]:
        return await asyncio.gather(*[group.call_rank(0, "meet", 2) for _ in range(2)])

    assert run(both()) == [2, 2]


def test_async_methods_run_while_a_sync_one_does(run: Run, group: WorkerGroup) -> None:
    async def both() -> list[bool | None]:
        return await asyncio.gather(group.call_rank(1, "hold", 20.0), group.call_rank(1, "let_go"))

    assert run(both()) == [True, None]


def test_arrays_arrive_equal_and_writable(run: Run, group: WorkerGroup) -> None:
    sent = {"tokens": np.arange(200_000), "small": np.ones(3, np.float32), "text": "ünï", "none": None}
    for received in run(group.call("echo", sent)):
        np.testing.assert_array_equal(received["tokens"], sent["tokens"])
        assert received["tokens"].flags.writeable
        assert received["small"].dtype == np.float32
        assert (received["text"], received["none"]) == ("ünï", None)


def test_local_workers_get_and_give_the_very_objects(started: tuple[str, Run, WorkerGroup]) -> None:
    name, run, group = started
    sent = np.zeros(3)
    assert (run(group.call("echo", sent))[0] is sent) == (name == "local")


# -- errors


def test_error_of_ours_keeps_its_class_and_gets_role_rank_and_host(run: Run, group: WorkerGroup) -> None:
    host = group.members[1].host
    with pytest.raises(CorruptTensorError) as caught:
        run(group.call_rank(1, "corrupt"))
    assert mentions(str(caught.value), "reward rank 1", host, "layer.0.weight")
    assert "in corrupt" in caught.value.trace


def test_guard_that_trips_in_a_worker_keeps_its_id(run: Run, group: WorkerGroup) -> None:
    with raises_error(GuardTrippedError, "reward rank 0") as caught:
        run(group.call_rank(0, "trip"))
    assert caught.value.guard == "weights-unchanged"


def test_any_other_error_says_who_where_what_and_keeps_the_trace(run: Run, group: WorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        run(group.call_rank(1, "divide"))
    error = caught.value
    assert (error.role, error.rank, error.host, error.method) == ("reward", 1, group.members[1].host, "divide")
    assert mentions(str(error), "ZeroDivisionError")
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "return 1 / 0" in error.trace


def test_errors_of_async_methods_are_reported_alike(run: Run, group: WorkerGroup) -> None:
    with raises_error(WorkerError, "reward rank 0", "fail_async", "KeyError", "'lost'"):
        run(group.call_rank(0, "fail_async"))


def test_exception_that_cannot_be_pickled_still_says_what_it_was(run: Run, group: WorkerGroup) -> None:
    with raises_error(WorkerError, "cannot_travel", "CannotTravel"):
        run(group.call_rank(0, "cannot_travel"))


def test_exit_in_a_worker_is_an_error_and_ends_nothing(run: Run, group: WorkerGroup) -> None:
    with raises_error(WorkerError, "SystemExit", "3"):
        run(group.call_rank(0, "exit"))
    assert run(group.call_rank(0, "greet", "Ann")) == "good day Ann from 0"


def test_unknown_method_is_named(run: Run, group: WorkerGroup) -> None:
    with raises_error(WorkerError, "'Recorder'", "'gret'"):
        run(group.call("gret", "Ann"))


def test_cause_is_named_though_its_echoes_came_first(run: Run, group: WorkerGroup) -> None:
    with raises_error(WorkerError, "reward rank 1", "ValueError"):
        run(group.call("fail_on_one_and_echo_on_others", 1))


def test_deadline_names_the_ranks_that_did_not_answer(run: Run, group: WorkerGroup) -> None:
    with raises_error(WorkerTimeoutError, "wait_on_rank", "2", "rank 1") as caught:
        run(group.call("wait_on_rank", 1, 6.0, deadline_s=2))
    assert "in wait_on_rank" in caught.value.trace
    assert run(group.call("wait_on_rank", 0, 0.0)) == ["done", "done"]


def test_deadline_and_cancelling_end_async_methods(run: Run, group: WorkerGroup) -> None:
    with pytest.raises(WorkerTimeoutError):
        run(group.call("wait_forever", deadline_s=2))
    assert run(group.call("until_cancelled")) == [True, True]


# -- killing


def test_a_worker_that_is_killed_is_gone_and_its_error_names_the_cause_and_the_stack(
    run: Run, started: tuple[str, Run, WorkerGroup], another: Executor
) -> None:
    async def hang_and_kill() -> None:
        async with another:
            group = (await another.start([spec("engine", survives="while_others_live")]))["engine"]
            hanging = asyncio.ensure_future(group.call_rank(1, "wait_forever", deadline_s=math.inf))
            await group.call_rank(1, "until_waiting")
            death = await group.kill(1, "no heartbeat")
            assert re.fullmatch(r"engine rank 1 on \S+ .*: no heartbeat", str(death))
            assert "engine[1].wait_forever:" in death.trace
            with raises_error(WorkerHungError, "engine rank 1"):
                await group.call_rank(1, "echo", 1)
            if started[0] == "local":  # whose threads cannot be killed: nothing of the role is used any more
                hanging.cancel()
                with raises_error(WorkerHungError, "rank 1"):
                    await group.call_rank(0, "echo", 1)
                return
            with raises_error(WorkerHungError, "engine rank 1"):
                await hanging
            while Path(f"/proc/{group.members[1].pid}").exists():
                await asyncio.sleep(0.05)
            assert group.lost == {1}
            assert await group.call("echo", 2) == [2]
            await group.replace(1)
            assert await group.call("echo", 3) == [3, 3]

    run(hang_and_kill())


# -- starting and closing


def test_failure_to_make_a_worker_names_it_and_leaves_nothing(run: Run, another: Executor) -> None:
    broken = spec("broken", target="executor_workers:BrokenOnRank", args={"rank": 1})
    with raises_error(WorkerError, "broken rank 1", "ValueError", "rank 1"):
        run(another.start([spec("fine"), broken]))


def test_worker_class_that_does_not_exist_is_named(run: Run, another: Executor) -> None:
    with raises_error(PluginLoadError, "reward rank 0", "executor_workers", "'Nobody'"):
        run(another.start([spec(ranks=1, target="executor_workers:Nobody")]))


def test_workers_are_closed_once_and_closing_again_does_nothing(run: Run, another: Executor, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    run(another.start([spec(args={"notes": str(notes)})]))
    run(another.close())
    run(another.close())
    assert sorted(notes.read_text().splitlines()) == ["closed 0", "closed 1"]


def test_variables_of_a_role_are_there_and_gone_afterwards(run: Run, another: Executor) -> None:
    async def see() -> list[list[str | None]]:
        async with another:
            groups = await another.start([spec(env={"ROLL_TEST_COLOUR": "blue"})])
            return await groups["reward"].call("environment", "ROLL_TEST_COLOUR")

    assert run(see()) == [["blue"], ["blue"]]
    assert "ROLL_TEST_COLOUR" not in os.environ


def test_roles_that_contradict_each_other_cannot_share_a_process() -> None:
    executor = make_executor("local", CpuPlatform(), slots_per_node=2)
    one, two = spec("one", env={"COLOUR": "blue"}), spec("two", env={"COLOUR": "red"})
    with raises_error(UnsupportedError, "COLOUR=blue", "COLOUR=red"):
        asyncio.run(executor.start([one, two]))
    assert "COLOUR" not in os.environ


def test_local_executor_has_the_slots_of_this_host_only() -> None:
    class TwoDevices(CpuPlatform):
        slots_share_cores = False

        def device_count(self) -> int:
            return 2

    where = place_roles({"a": TrainWorkerConfig(device_mapping=(3,))}, TwoDevices(), num_gpus_per_node=8)["a"]
    executor = make_executor("local", TwoDevices(), slots_per_node=8)
    wanted = GroupSpec(role="actor_train", kind="train", target="executor_workers:Recorder", places=where)
    with raises_error(PlacementError, "actor_train", "slot 3", "2", "0", "1"):
        asyncio.run(executor.start([wanted]))


def test_local_executor_refuses_two_workers_that_train() -> None:
    executor = make_executor("local", CpuPlatform(), slots_per_node=2)
    two = GroupSpec(role="actor_train", kind="train", target="executor_workers:Recorder", places=places(2))
    with raises_error(UnsupportedError, "actor_train", "2"):
        asyncio.run(executor.start([two]))


# -- Ray only: processes of their own


only_ray = pytest.mark.parametrize("started", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True)


@only_ray
def test_workers_of_ray_are_told_who_they_are(run: Run, group: WorkerGroup) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WORKER_NAME", "CLUSTER_NAME", "MASTER_ADDR", "OMP_NUM_THREADS")
    assert run(group.call("environment", *names)) == [
        ["0", "2", "0", "reward-0", "reward", "127.0.0.1", "1"],
        ["1", "2", "1", "reward-1", "reward", "127.0.0.1", "1"],
    ]
    (_, first), (_, second) = run(group.call("where"))
    assert first == second
    assert first.master_port > 0
    assert run(group.call("environment", "MASTER_PORT")) == [[str(first.master_port)]] * 2


@only_ray
def test_result_that_cannot_be_sent_is_an_error_of_its_call(run: Run, group: WorkerGroup) -> None:
    with raises_error(WorkerError, "unsendable"):
        run(group.call_rank(0, "unsendable"))


@only_ray
def test_arguments_that_cannot_be_sent_are_refused(run: Run, group: WorkerGroup) -> None:
    with raises_error(UnsupportedError, "reward.echo"):
        run(group.call("echo", (each for each in ())))


@only_ray
@pytest.mark.parametrize("pending", ["own call", "another role's call", "no call"])
def test_killed_worker_is_noticed_and_named(run: Run, another: Executor, pending: str) -> None:
    async def kill_one() -> None:
        async with another:
            groups = await another.start([spec("victims"), spec("others", ranks=1)])
            victim = groups["victims"].members[1]
            waiting = {
                "own call": lambda: groups["victims"].call("sleep", 60),
                "another role's call": lambda: groups["others"].call("wait_forever"),
                "no call": another.watch,
            }[pending]()
            task = asyncio.ensure_future(waiting)
            await asyncio.sleep(0.2)
            os.kill(victim.pid, signal.SIGKILL)
            with raises_error(WorkerDiedError, "victims rank 1", victim.host, victim.pid) as caught:
                await asyncio.wait_for(task, 30)
            assert caught.value.method == ("sleep" if pending == "own call" else "")
            with raises_error(WorkerDiedError, "victims rank 1"):
                another.check_alive()
            with raises_error(WorkerDiedError, "victims rank 1"):
                await groups["others"].call("greet", "Ann")

    run(kill_one())


@only_ray
def test_a_worker_whose_engine_died_counts_as_dead_and_can_be_replaced(run: Run, another: Executor) -> None:
    async def lose_one() -> None:
        async with another:
            group = (await another.start([spec(survives="while_others_live")]))["reward"]
            with raises_error(WorkerDiedError, "reward rank 1", "lose_engine"):
                await group.call_rank(1, "lose_engine")
            another.check_alive()
            assert group.lost == {1}
            assert await group.call("greet", "Ann") == ["hello Ann from 0"]
            await group.replace(1)
            assert group.lost == frozenset()
            assert await group.call("greet", "Ann") == ["hello Ann from 0", "hello Ann from 1"]

    run(lose_one())


@only_ray
def test_the_last_worker_of_a_role_that_survives_all_can_be_replaced(run: Run, another: Executor) -> None:
    async def lose_the_only_one() -> None:
        async with another:
            group = (await another.start([spec("engine", ranks=1, survives="always")]))["engine"]
            hanging = asyncio.ensure_future(group.call("wait_forever"))
            await asyncio.sleep(0.2)
            os.kill(group.members[0].pid, signal.SIGKILL)
            with raises_error(WorkerDiedError, "engine rank 0"):
                await asyncio.wait_for(hanging, 60)
            another.check_alive()
            assert group.lost == {0}
            assert group.survives_all
            assert await group.call("greet", "Ann") == []
            with raises_error(WorkerDiedError, "engine rank 0"):
                await group.call_each("greet", [("Ann",)])
            await group.replace(0)
            assert await group.call("greet", "Ann") == ["hello Ann from 0"]

    run(lose_the_only_one())


@only_ray
def test_a_worker_behind_a_network_gap_is_killed_if_its_group_survives_that(
    run: Run, another: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from roll_core.runtime.cluster.executors import ray_worker

    monkeypatch.setattr(ray_worker, "EXIT_NOTICE_S", 0.1)

    async def lose_a_call() -> None:
        async with another:
            group: Any = (await another.start([spec(survives="while_others_live")]))["reward"]
            behind = group._workers[1]
            asked = [asyncio.ensure_future(group.call_rank(1, "wait_forever", deadline_s=60)) for _ in range(2)]
            await group.call_rank(1, "greet", "Ann")
            error = ray.exceptions.ActorUnavailableError("no route to host", None)
            behind._call_lost(next(iter(behind._pending)), error)
            for each in asked:
                with raises_error(WorkerDiedError, "reward rank 1", "route"):
                    await each
            another.check_alive()
            assert group.lost == {1}
            await group.replace(1)
            assert await group.call("greet", "Ann") == ["hello Ann from 0", "hello Ann from 1"]

    run(lose_a_call())


@only_ray
def test_crash_is_told_from_a_kill_and_shows_where_it_was(run: Run, another: Executor) -> None:
    async def crash() -> None:
        async with another:
            groups = await another.start([spec(ranks=1)])
            with raises_error(WorkerDiedError, "crash") as caught:
                await groups["reward"].call("crash")
            assert "executor_workers.py" in caught.value.trace

    run(crash())


@only_ray
@pytest.mark.slow
def test_collectives_fail_with_the_cause_and_not_with_its_echo(run: Run, another: Executor) -> None:
    async def reduce() -> None:
        async with another:
            pair = spec("actor_train", target="executor_workers:Collective")
            group = (await another.start([pair]))["actor_train"]
            assert await group.call("sum_of_ranks") == [3, 3]
            with raises_error(WorkerDiedError, "actor_train rank 1", "die_before_reduce"):
                await group.call("die_before_reduce", 1)

    run(reduce())


def test_ray_address_where_nobody_answers_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        executor = make_executor("ray", CpuPlatform(), slots_per_node=2)
        with raises_error(PlacementError, "RAY_ADDRESS", address):
            asyncio.run(executor.start([]))
