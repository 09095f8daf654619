"""Collects the results of one call to several workers, and selects the root cause if ranks fail.

A failure on one rank breaks its peers' collectives a moment later ("connection reset by peer"). The exit of a process
may be noticed later still. So when a rank fails, the other ranks get a grace period to return. Then the cause is
chosen: an exited worker before an exception, an original error before one that looks like a consequence ("echo") of
another rank's failure, the earliest first.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.errors import RollError, WorkerError, WorkerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""Seconds that the other ranks have to return after one has failed."""
ECHO_GRACE_S = 15.0
"""Grace period if all failures so far look like echoes: the exit that caused them is noticed within seconds."""
SAME_MOMENT_S = 0.1
_ECHO = re.compile(
    r"connection (was )?(reset|closed|refused|aborted|lost)|closed by (the )?(remote )?peer|broken pipe|end of file"
    r"|socket.*(closed|reset)|recv.*0 bytes|remote process exited",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A running worker: its rank, host and process."""

    rank: int
    host: str
    pid: int
    node: int
    address: str = "127.0.0.1"
    """IP address at which other workers reach its host."""
    slots: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception in a worker, in a form that can be sent to the driver."""

    error: BaseException | None
    """The exception itself if it can be sent, otherwise None."""
    summary: str
    """Type and message of the exception."""
    trace: str
    at: float
    """Time of the failure on the worker's clock, in seconds since the epoch."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Record an exception that was just caught."""
        try:
            message = str(error)
        except Exception:  # a third-party __str__ that raises
            message = ""
        name = type(error).__name__
        return cls(
            error=error,
            summary=f"{name}: {message}" if message else name,
            trace="".join(traceback.format_exception(error)),
            at=time.time(),
        )

    @property
    def is_echo(self) -> bool:
        """True if it looks like the consequence of another rank's failure."""
        return isinstance(self.error, ConnectionError) or bool(_ECHO.search(self.summary))


class CallFailed(Exception):
    """A worker's method raised. Internal to executors: `collect` converts it, so users never see it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


async def collect(
    role: str,
    method: str,
    futures: Mapping[Member, asyncio.Future[Any]],
    seconds: float,
    stacks: Callable[[Sequence[int]], Awaitable[str]] | None = None,
) -> list[Any]:
    """Results in the order of `futures`; an empty list if there are none.

    Futures that are still pending when the function returns or raises are cancelled. After a missed deadline, `stacks`
    returns the stacks of the ranks that did not return; they become the error's trace.
    """
    if not futures:
        return []
    for future in futures.values():
        future.add_done_callback(retrieve)
    try:
        timeout = None if seconds == math.inf else seconds
        _, pending = await asyncio.wait(futures.values(), timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        if any(_failed(future) for future in futures.values()):
            await _let_others_answer(futures)
            raise_first_cause(role, method, futures)
        if pending:
            silent = [member for member, future in futures.items() if future in pending]
            ranks, hosts = [member.rank for member in silent], [member.host for member in silent]
            late = WorkerTimeoutError(role, method, seconds, ranks, hosts)
            late.trace = await stacks(ranks) if stacks else ""
            raise late
        return [future.result() for future in futures.values()]
    finally:
        for future in futures.values():
            future.cancel()


def raise_first_cause(role: str, method: str, futures: Mapping[Member, asyncio.Future[Any]]) -> None:
    """Raise the error of the rank that failed first, if any. The module docstring describes the choice."""
    failures: list[tuple[bool, float, Member, Failure]] = []
    for member, future in futures.items():
        if not _failed(future):
            continue
        error = future.exception()
        if isinstance(error, CallFailed):
            failures.append((error.failure.is_echo, error.failure.at, member, error.failure))
        elif error is not None:
            raise error
    if failures:
        echo, _, _, first = min(failures, key=lambda each: each[:2])
        # Ranks with the same error fail at about the same time: report the lowest of them.
        _, _, member, failure = next(
            each for each in failures if each[0] == echo and (each[3] is first or _alike(each[3], first))
        )
        for _, _, other, secondary in failures:
            if other is not member:
                log.debug("%s %s: %s also failed: %s", role, other, method, secondary.summary)
        told = located(role, member, method, failure)
        if told is failure.error:  # an exception must not become its own cause
            raise told
        raise told from failure.error


def located(role: str, member: Member, method: str, failure: Failure) -> RollError:
    """Error for the driver after a worker's failure: the same class for a `RollError`, otherwise `WorkerError`."""
    where = f"{role} rank {member.rank} on {member.host}"
    if isinstance(failure.error, RollError):
        try:
            error = failure.error.located(where)
        except TypeError:
            log.debug("%s cannot be made from its own arguments", type(failure.error).__name__)
        else:
            error.trace = error.trace or failure.trace
            return error
    return WorkerError(role, member.rank, member.host, method, failure.summary, failure.trace)


async def _let_others_answer(futures: Mapping[Member, asyncio.Future[Any]]) -> None:
    started = time.monotonic()
    while pending := [future for future in futures.values() if not future.done()]:
        grace_s = ECHO_GRACE_S if _only_echoes(futures) else GRACE_S
        left_s = started + grace_s - time.monotonic()
        if left_s <= 0:
            return
        await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)


def _only_echoes(futures: Mapping[Member, asyncio.Future[Any]]) -> bool:
    errors = [future.exception() for future in futures.values() if _failed(future)]
    return all(isinstance(error, CallFailed) and error.failure.is_echo for error in errors)


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None


def _alike(one: Failure, other: Failure) -> bool:
    return one.summary == other.summary and abs(one.at - other.at) < SAME_MOMENT_S


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved, so that asyncio does not log failures other than the first cause."""
    if not future.cancelled():
        future.exception()
