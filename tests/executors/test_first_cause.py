"""`collect` on futures that are settled by hand."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from roll_core.errors import (
    ConfigError,
    ConfigProblem,
    NonFiniteError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from roll_core.runtime.cluster.executors import base
from roll_core.runtime.cluster.executors.base import CallFailed, Failure, Member, collect
from roll_testing.errors import raises_error

Settle = Callable[[list[asyncio.Future[Any]]], Coroutine[Any, Any, None]]


def outcome(settle: Settle, ranks: int = 3, seconds: float = 30) -> list[Any]:
    async def run() -> list[Any]:
        loop = asyncio.get_running_loop()
        futures = {Member(rank=r, host=f"h{r}", pid=r, node=0): loop.create_future() for r in range(ranks)}
        settling = asyncio.create_task(settle(list(futures.values())))
        try:
            return await collect("actor", "step", futures, seconds)
        finally:
            settling.cancel()
            assert all(future.done() for future in futures.values())

    return asyncio.run(run())


def failed(error: Exception, at: float | None = None) -> CallFailed:
    return CallFailed(
        Failure(error=error, summary=f"{type(error).__name__}: {error}", trace="trace", failed_at=at or time.time())
    )


def test_results_are_in_order_of_ranks() -> None:
    async def settle(futures: list[asyncio.Future[Any]]) -> None:
        for rank in (2, 0, 1):
            futures[rank].set_result(rank * 10)
            await asyncio.sleep(0)

    assert outcome(settle) == [0, 10, 20]


def test_error_of_one_rank_is_raised_though_others_never_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "GRACE_S", 0.05)

    async def settle(futures: list[asyncio.Future[Any]]) -> None:
        futures[1].set_exception(failed(ValueError("bad batch")))

    with raises_error(WorkerError, "actor rank 1", "h1", "ValueError") as caught:
        outcome(settle)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.trace == "trace"


def test_earliest_error_by_the_workers_clocks_is_the_cause() -> None:
    async def settle(futures: list[asyncio.Future[Any]]) -> None:
        futures[0].set_exception(failed(ValueError("second"), at=20.0))
        futures[2].set_exception(failed(ValueError("first"), at=10.0))
        futures[1].set_result(None)

    with raises_error(WorkerError, "rank 2", "first"):
        outcome(settle)


def test_lowest_rank_represents_equal_failures() -> None:
    async def settle(futures: list[asyncio.Future[Any]]) -> None:
        for rank, at in ((2, 10.0), (1, 10.01), (0, 10.02)):
            futures[rank].set_exception(failed(ValueError("same"), at=at))

    with raises_error(WorkerError, "rank 0"):
        outcome(settle)


@pytest.mark.parametrize(
    "echo",
    [
        ConnectionResetError("reset"),
        RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:34567"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
        BrokenPipeError("Broken pipe"),
    ],
)
def test_broken_connection_is_not_the_cause_if_a_later_error_is(echo: Exception) -> None:
    async def settle(futures: list[asyncio.Future[Any]]) -> None:
        futures[0].set_exception(failed(echo, at=10.0))
        futures[1].set_result(None)
        await asyncio.sleep(0.05)
        futures[2].set_exception(failed(NonFiniteError("loss is nan"), at=10.05))

    with raises_error(NonFiniteError, "actor rank 2", "h2"):
        outcome(settle)


def test_broken_connection_is_the_cause_if_nothing_else_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "ECHO_GRACE_S", 0.05)

    async def settle(futures: list[asyncio.Future[Any]]) -> None:
        futures[0].set_exception(failed(ConnectionResetError("reset")))

    with raises_error(WorkerError, "rank 0", "h0", "ConnectionResetError"):
        outcome(settle)


def test_worker_death_explains_earlier_errors() -> None:
    death = WorkerDiedError("critic", 1, "h9", "", "process 5 is gone")

    async def settle(futures: list[asyncio.Future[Any]]) -> None:
        futures[0].set_exception(failed(ConnectionResetError("reset"), at=1.0))
        await asyncio.sleep(0.05)
        futures[1].set_exception(death)
        futures[2].set_exception(death)

    with raises_error(WorkerDiedError, "critic rank 1", "h9", "5"):
        outcome(settle)


def test_deadline_names_every_rank_that_did_not_answer() -> None:
    async def settle(futures: list[asyncio.Future[Any]]) -> None:
        futures[1].set_result(None)

    with raises_error(WorkerTimeoutError, "0.05", "rank 0", "h0", "rank 2", "h2"):
        outcome(settle, seconds=0.05)


def test_roll_error_with_own_arguments_arrives_complete() -> None:
    problem = ConfigProblem(where="a.yaml:1:2", key="x", message="is wrong")

    async def settle(futures: list[asyncio.Future[Any]]) -> None:
        futures[0].set_exception(failed(ConfigError([problem])))
        futures[1].set_result(None)
        futures[2].set_result(None)

    with pytest.raises(ConfigError) as caught:
        outcome(settle)
    assert caught.value.problems == (problem,)


def test_error_with_a_source_is_not_its_own_cause() -> None:
    async def settle(futures: list[asyncio.Future[Any]]) -> None:
        futures[0].set_exception(failed(WorkerTimeoutError("reward", "make", 60.0, [0], ["h0"])))

    with raises_error(WorkerTimeoutError, "reward", "make", "rank 0") as caught:
        outcome(settle, ranks=1)
    assert caught.value.__cause__ is None
