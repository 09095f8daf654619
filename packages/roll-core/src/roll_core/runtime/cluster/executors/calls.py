"""One call to several workers: wait for all, and when it goes wrong say what went wrong first.

A failure on one rank breaks its peers' collectives a moment later ("connection reset by peer"), and the news of a dead
process may come later still. So when a rank fails, the others get a moment to answer, and the cause is chosen:
a dead worker before an error, an error of its own before one that looks like the echo of another's, the earliest first.
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
"""How long the other ranks may still answer after one has failed."""
ECHO_GRACE_S = 15.0
"""The same where all failures so far look like echoes: the death that caused them is noticed within seconds."""
SAME_MOMENT_S = 0.1
_ECHO = re.compile(
    r"connection (was )?(reset|closed|refused|aborted|lost)|closed by (the )?(remote )?peer|broken pipe|end of file"
    r"|socket.*(closed|reset)|recv.*0 bytes|remote process exited",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker that runs."""

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
    """An exception in a worker, in a form that can be sent."""

    error: BaseException | None
    """The exception itself where it can be sent."""
    summary: str
    """Its type and message."""
    trace: str
    at: float
    """Seconds since the epoch on the worker's clock."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Record an exception that was just caught."""
        try:
            message = str(error)
        except Exception:  # foreign code: its __str__ raises
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
        """Whether it looks like the consequence of another rank's failure."""
        return isinstance(self.error, ConnectionError) or bool(_ECHO.search(self.summary))


class CallFailed(Exception):
    """A worker's method raised. A signal between an executor and `collect`, never seen by a person."""

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
    """Results in the order of `futures`; none where nobody was asked. Futures that are not done when it returns or
    raises are cancelled.

    `stacks` tells where ranks hang that did not answer in time: that becomes the trace of the error.
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
    """Raise the error of the rank that failed first, if one did. See this module's text for the choice."""
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
        # Ranks that fail alike do so at about the same time: the lowest of them speaks for all.
        _, _, member, failure = next(
            each for each in failures if each[0] == echo and (each[3] is first or _alike(each[3], first))
        )
        for _, _, other, secondary in failures:
            if other is not member:
                log.debug("%s %s: %s also failed: %s", role, other, method, secondary.summary)
        told = located(role, member, method, failure)
        if told is failure.error:  # which must not become its own cause
            raise told
        raise told from failure.error


def located(role: str, member: Member, method: str, failure: Failure) -> RollError:
    """The error to raise here for a failure there: its own class if it is ours, else `WorkerError`."""
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
    """Mark the exception as seen, so that asyncio does not report the ones that were not the first cause."""
    if not future.cancelled():
        future.exception()
