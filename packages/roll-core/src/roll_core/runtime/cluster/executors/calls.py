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
        if _errors(futures):
            await _grace_period(futures)
            raise_first_cause(role, method, futures)
        if pending:
            late = [member for member, future in futures.items() if future in pending]
            ranks, hosts = [member.rank for member in late], [member.host for member in late]
            error = WorkerTimeoutError(role, method, seconds, ranks, hosts)
            error.trace = await stacks(ranks) if stacks else ""
            raise error
        return [future.result() for future in futures.values()]
    finally:
        for future in futures.values():
            future.cancel()


def _errors(futures: Mapping[Member, asyncio.Future[Any]]) -> dict[Member, BaseException]:
    """Exceptions of the ranks that have failed so far."""
    done = {member: future for member, future in futures.items() if future.done() and not future.cancelled()}
    return {member: error for member, future in done.items() if (error := future.exception()) is not None}


async def _grace_period(futures: Mapping[Member, asyncio.Future[Any]]) -> None:
    """Wait for the other ranks: longer if all failures so far look like echoes."""
    started = time.monotonic()
    while pending := [future for future in futures.values() if not future.done()]:
        errors = _errors(futures).values()
        echoes = all(isinstance(error, CallFailed) and error.failure.is_echo for error in errors)
        left_s = started + (ECHO_GRACE_S if echoes else GRACE_S) - time.monotonic()
        if left_s <= 0:
            return
        await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)


def raise_first_cause(role: str, method: str, futures: Mapping[Member, asyncio.Future[Any]]) -> None:
    """Raise the error of the rank that failed first. The module docstring describes the choice."""
    failures: dict[Member, Failure] = {}
    for member, error in _errors(futures).items():
        if not isinstance(error, CallFailed):
            raise error
        failures[member] = error.failure
    first = min(failures.values(), key=lambda each: (each.is_echo, each.at))

    def is_cause(failure: Failure) -> bool:
        # Ranks with the same error fail at about the same time: report the lowest of them.
        alike = failure.summary == first.summary and abs(failure.at - first.at) < SAME_MOMENT_S
        return failure is first or (alike and failure.is_echo == first.is_echo)

    member, failure = next(each for each in failures.items() if is_cause(each[1]))
    for other, secondary in failures.items():
        if other is not member:
            log.debug("%s %s: %s also failed: %s", role, other, method, secondary.summary)
    cause = located(role, member, method, failure)
    if cause is failure.error:  # an exception must not become its own cause
        raise cause
    raise cause from failure.error


def located(role: str, member: Member, method: str, failure: Failure) -> RollError:
    """Error for the driver after a worker's failure: the same class for a `RollError`, otherwise `WorkerError`."""
    where = f"{role} rank {member.rank} on {member.host}"
    if isinstance(failure.error, RollError):
        try:
            error = failure.error.located(where)
        except TypeError:
            log.debug("%s cannot be constructed from its own arguments", type(failure.error).__name__)
        else:
            error.trace = error.trace or failure.trace
            return error
    return WorkerError(role, member.rank, member.host, method, failure.summary, failure.trace)


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved, so that asyncio does not log failures other than the first cause."""
    if not future.cancelled():
        future.exception()
