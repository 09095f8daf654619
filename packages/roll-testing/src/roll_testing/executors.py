"""Conformance kit for executors.

    class TestMine(ExecutorConformance):
        name = "mine"

The tests start a role of two workers on a platform of the kit, whose accelerators no vendor makes. Tests of exits and
of visible devices are skipped for an executor whose workers run in the driver's process.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import psutil
import pytest
from typing_extensions import override

from roll_core.builtin.cpu import CpuPlatform
from roll_core.errors import (
    CorruptTensorError,
    RollError,
    UnsupportedError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from roll_core.plugins.targets import load_target
from roll_core.runtime.cluster.executors.base import Executor, GroupSpec, Place, WorkerCall, WorkerGroup, WorkerStub
from roll_core.spec.providers import ExecutorProvider
from roll_testing.executor_worker import ProbeWorker
from roll_testing.packaging import PUBLIC, PackagingTests

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

RANKS = 2
VARIABLE = "ROLL_TEST_EXECUTOR"
DEVICES = "ROLL_TEST_DEVICES"
NUM_CALLS = 30


class ProbeAccelerators(CpuPlatform):
    """Accelerators of an unknown vendor, one per rank. They are none: workers of the kit use no device."""

    name = "probe"
    resource_name = "ROLL_TEST_DEVICE"
    visible_devices = DEVICES
    slots_share_cores = False

    @override
    def device_count(self) -> int:
        return RANKS


class ExecutorConformance(PackagingTests):
    """Tests that every executor must pass."""

    exit_s: ClassVar[float] = 20.0
    """Time limit in seconds for the exit of a closed worker's process, and for the notice of an exit."""

    _kind = ExecutorProvider
    _public = (*PUBLIC, "roll_core.plugins.requirements", "roll_core.runtime.cluster")

    @pytest.fixture
    def run(self) -> Callable[[Coroutine[Any, Any, Any]], Any]:
        """Run a coroutine on the event loop of all tests of the class, for at most `timeout_s` seconds."""
        self._engine_or_skip()
        runner = self._once("runner").setdefault((), asyncio.Runner())
        return lambda coroutine: runner.run(asyncio.wait_for(coroutine, self.timeout_s))

    @pytest.fixture
    def group(self, run: Any, tmp_path_factory: pytest.TempPathFactory) -> WorkerGroup:
        """A role that is started once per class. Tests that end workers start their own."""
        started = self._once("started")
        if not started:
            started[()] = executor = self._executor()
            started["group"] = run(executor.start([_spec(tmp_path_factory.mktemp("workers"))]))["probe"]
        group: WorkerGroup = started["group"]
        return group

    @classmethod
    def teardown_class(cls) -> None:
        """Close the shared executor. pytest calls this after the last test of the class."""
        for runner in cls._once("runner").values():
            if executor := cls._once("started").get(()):
                runner.run(executor.close())
            runner.close()
        cls._shared = {}

    # -- calls ---------------------------------------------------------------------------------------------------------

    def test_results_are_ordered_by_rank(self, run: Any, group: WorkerGroup) -> None:
        """`all`, `each` and `at` must return the results of the ranks that they name, in rank order."""
        facts, echo = _workers(group)(ProbeWorker.facts), _workers(group)(ProbeWorker.echo)
        assert [answer[0] for answer in run(facts.all(VARIABLE))] == list(range(RANKS))
        assert run(echo.each([echo.args("a"), echo.args("b")])) == ["a", "b"]
        assert run(facts.at(1, VARIABLE))[0] == 1

    def test_workers_get_their_arguments(self, run: Any, group: WorkerGroup) -> None:
        """A worker must get its place, the arguments and the environment variables of its `GroupSpec`."""
        for rank, answer in enumerate(run(_workers(group)(ProbeWorker.facts).all(VARIABLE))):
            assert (answer[0], answer[1]) == (rank, RANKS), f"rank {rank} has the place {answer[:2]}"
            assert answer[3:] == ("good day", "blue"), f"rank {rank} has the argument and the variable {answer[3:]}"

    def test_members_name_their_processes(self, run: Any, group: WorkerGroup) -> None:
        """`members` must have the rank and the process id of each worker, in rank order."""
        pids = [answer[2] for answer in run(_workers(group)(ProbeWorker.facts).all(VARIABLE))]
        assert [(member.rank, member.pid) for member in group.members] == list(enumerate(pids))

    def test_sync_methods_run_in_order_on_one_thread(self, run: Any, group: WorkerGroup) -> None:
        """Sync methods must run on the constructor's thread in the order of their calls, whatever their arguments."""

        async def calls() -> tuple[list[list[bool]], list[list[int]]]:
            large = [np.zeros(200_000 if number % 3 == 0 else 1) for number in range(NUM_CALLS)]
            both = [
                (
                    _workers(group)(ProbeWorker.echo).all(large[number]),
                    _workers(group)(ProbeWorker.note).all(number),
                )
                for number in range(NUM_CALLS)
            ]
            answers = await asyncio.gather(*[call for pair in both for call in pair])
            return answers[1::2], await _workers(group)(ProbeWorker.noted).all()

        threads, numbers = run(calls())
        assert numbers == [list(range(NUM_CALLS))] * RANKS
        assert threads == [[True] * RANKS] * NUM_CALLS, "a sync method ran on another thread than the constructor"

    def test_async_methods_overlap(self, run: Any, group: WorkerGroup) -> None:
        """Async methods must run concurrently with each other and with a sync method."""

        async def calls() -> list[Any]:
            meet, hold = _workers(group)(ProbeWorker.meet), _workers(group)(ProbeWorker.hold)
            met = await asyncio.gather(meet.at(0, 2), meet.at(0, 2))
            held, _ = await asyncio.gather(hold.at(1, 20.0), _workers(group)(ProbeWorker.free).at(1))
            return [*met, held]

        assert run(calls()) == [2, 2, True]

    def test_arrays_arrive_unchanged(self, run: Any, group: WorkerGroup) -> None:
        """Arrays, texts and None must arrive, and return, with the same values and types."""
        sent = {"tokens": np.arange(200_000), "small": np.ones(3, np.float32), "text": "ünï", "none": None}
        for answer in run(_workers(group)(ProbeWorker.echo).all(sent)):
            for name in ("tokens", "small"):
                np.testing.assert_array_equal(answer[name], sent[name], strict=True)
            assert (answer["text"], answer["none"]) == ("ünï", None)

    def test_workers_see_only_their_own_device(self, run: Any, tmp_path: Path) -> None:
        """A worker with a slot must see one device of its own in the platform's variable."""
        self._need_processes()

        async def devices() -> list[str | None]:
            async with self._executor() as executor:
                group = (await executor.start([_spec(tmp_path, slots=True)]))["probe"]
                return [facts[4] for facts in await _workers(group)(ProbeWorker.facts).all(DEVICES)]

        assert sorted(run(devices()), key=str) == [str(rank) for rank in range(RANKS)]

    # -- errors --------------------------------------------------------------------------------------------------------

    def test_an_error_of_roll_keeps_its_class(self, run: Any, group: WorkerGroup) -> None:
        """A `RollError` of a worker must arrive as its class, and name the role and the rank."""
        with pytest.raises(RollError) as caught:
            run(_workers(group)(ProbeWorker.corrupt).at(1))
        assert type(caught.value) is CorruptTensorError, f"{type(caught.value).__name__} was raised"
        assert "probe rank 1" in str(caught.value)
        assert "layer.0.weight" in str(caught.value)

    def test_any_other_error_is_located(self, run: Any, group: WorkerGroup) -> None:
        """Any other exception must become a `WorkerError` with role, rank, method and the worker's traceback."""
        with pytest.raises(WorkerError) as caught:
            run(_workers(group)(ProbeWorker.divide).at(1))
        error = caught.value
        assert (error.role, error.rank, error.method) == ("probe", 1, "divide")
        assert "1 / 0" in error.trace

    def test_an_unknown_method_is_an_error(self, run: Any, group: WorkerGroup) -> None:
        """A call of a method that the class lacks must raise a `WorkerError`, not block."""
        unknown: WorkerCall[..., Any] = WorkerCall(group, "no_such_method")
        with pytest.raises(WorkerError):
            run(unknown.all())

    def test_the_cause_is_raised_before_its_consequences(self, run: Any, group: WorkerGroup) -> None:
        """If a rank's failure breaks the connections of other ranks, its own error must be raised."""
        with pytest.raises(WorkerError) as caught:
            run(_workers(group)(ProbeWorker.fail).all(1))
        assert caught.value.rank == 1, f"the error is that of rank {caught.value.rank}: {caught.value}"

    def test_a_missed_deadline_cancels_the_call(self, run: Any, group: WorkerGroup) -> None:
        """`WorkerTimeoutError` must name the ranks, and their async methods must be cancelled."""
        with pytest.raises(WorkerTimeoutError) as caught:
            run(_workers(group)(ProbeWorker.wait_forever, 0.3).at(1))
        assert list(caught.value.ranks) == [1]
        assert run(_workers(group)(ProbeWorker.until_cancelled, 10.0).at(1))

    # -- starting and closing ------------------------------------------------------------------------------------------

    def test_closing_closes_every_worker_once(self, run: Any, tmp_path: Path) -> None:
        """`close` must call each worker's `close` once and end its process. It may be called again."""

        async def start_and_close() -> None:
            executor = self._executor()
            await executor.start([_spec(tmp_path)])
            await executor.close()
            await executor.close()

        run(start_and_close())
        assert sorted(path.name for path in tmp_path.glob("*.closed")) == [f"{rank}.closed" for rank in range(RANKS)]
        _check_exited(tmp_path, self.exit_s)

    def test_a_failed_start_leaves_no_worker(self, run: Any, tmp_path: Path) -> None:
        """If the constructor of one role raises, `start` must raise its error and end all workers."""
        broken = _spec(tmp_path, role="broken", fails=True)

        async def start() -> None:
            async with self._executor() as executor:
                with pytest.raises(WorkerError) as caught:
                    await executor.start([_spec(tmp_path), broken])
                assert caught.value.role == "broken", f"the error names the role {caught.value.role}"
                assert not self.provider.in_process or list(tmp_path.glob("*.closed")), "a worker was not closed"
                _check_exited(tmp_path, self.exit_s)

        run(start())

    # -- exits ---------------------------------------------------------------------------------------------------------

    def test_an_exit_ends_the_run(self, run: Any, tmp_path: Path) -> None:
        """If a worker exits, its calls and `watch` must raise `WorkerDiedError` with its role and rank."""
        self._need_processes()

        async def lose_one() -> None:
            async with self._executor() as executor:
                group = (await executor.start([_spec(tmp_path)]))["probe"]
                for wait in (partial(_workers(group)(ProbeWorker.exit).at, 1), executor.watch):
                    with pytest.raises(WorkerDiedError) as caught:
                        await asyncio.wait_for(wait(), self.exit_s)
                    assert (caught.value.role, caught.value.rank) == ("probe", 1)

        run(lose_one())

    def test_a_survived_exit_can_be_replaced(self, run: Any, tmp_path: Path) -> None:
        """If a role survives an exit, `lost` must name the rank, `all` must omit it, and `replace` must restart it.

        Skipped if the executor cannot replace workers.
        """
        self._need_processes()

        async def lose_one() -> None:
            async with self._executor() as executor:
                group = (await executor.start([_spec(tmp_path, survives="while_others_live")]))["probe"]
                with pytest.raises(WorkerDiedError):
                    await asyncio.wait_for(_workers(group)(ProbeWorker.exit).at(1), self.exit_s)
                if not group.lost:
                    pytest.skip(f"{self.name} does not survive exits")
                assert group.lost == {1}
                assert [answer[0] for answer in await _workers(group)(ProbeWorker.facts).all(VARIABLE)] == [0]
                try:
                    await group.replace(1)
                except UnsupportedError as error:
                    pytest.skip(str(error))
                assert not group.lost
                answers = await _workers(group)(ProbeWorker.facts).all(VARIABLE)
                assert [(member.rank, member.pid) for member in group.members] == [answer[:3:2] for answer in answers]

        run(lose_one())

    def _executor(self) -> Executor:
        executor: Executor = load_target(self.provider.target, owner=self.name)(
            ProbeAccelerators(), slots_per_node=RANKS
        )
        return executor

    def _need_processes(self) -> None:
        if self.provider.in_process:
            pytest.skip(f"the workers of {self.name} run in the driver's process")


def _workers(group: WorkerGroup) -> WorkerStub[ProbeWorker]:
    return WorkerStub(group)


def _spec(
    folder: Path, *, role: str = "probe", fails: bool = False, survives: Any = "never", slots: bool = False
) -> GroupSpec:
    indices = [(rank,) if slots else () for rank in range(RANKS)]
    return GroupSpec(
        role=role,
        kind="reward",
        target=f"{ProbeWorker.__module__}:{ProbeWorker.__name__}",
        places=tuple(
            Place(rank=rank, world_size=RANKS, local_rank=rank, slots=local_indices, local_indices=local_indices)
            for rank, local_indices in enumerate(indices)
        ),
        args={"greeting": "good day", "folder": str(folder), "fails": fails},
        env={VARIABLE: "blue"},
        timeout_s=60,
        survives=survives,
    )


def _check_exited(folder: Path, seconds: float) -> None:
    """Fail unless the processes of all workers that were constructed have exited, or are this process."""
    pids = {int(path.read_text(encoding="utf-8")) for path in folder.glob("*.pid")}
    family = [psutil.Process(pid) for pid in pids if pid != psutil.Process().pid and psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(family, timeout=seconds)
    assert not alive, f"processes of workers are still running: {', '.join(str(process.pid) for process in alive)}"
