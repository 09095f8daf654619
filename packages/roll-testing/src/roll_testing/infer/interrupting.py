"""Requests that must be running when something happens to them.

The host may pause a test for seconds between two lines, in which an engine finishes the request. The test then sends
the request again. The last attempt's result exposes an engine that never can be interrupted.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import signal
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from roll_core.types import Completion

T = TypeVar("T")

ATTEMPTS = 5


def until_interrupted(attempt: Callable[[], T], missed: Callable[[T], bool]) -> T:
    """Repeat `attempt` while `missed` is true of its result.

    Return the first other result, or that of the last attempt.
    """
    for _ in range(ATTEMPTS - 1):
        result = attempt()
        if not missed(result):
            return result
    return attempt()


def was_whole(completion: Completion, num: int, version: int) -> bool:
    """True if all outputs have all `num` tokens, sampled under weights of this version."""
    return all(
        output.finish_reason == "length" and output.versions.tolist() == [version] * num
        for output in completion.outputs
    )


@contextlib.contextmanager
def stopped(processes: Sequence[int]) -> Iterator[None]:
    """Stop the processes by SIGSTOP inside the block and continue them after it. They may have exited by then."""
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def is_open(asking: asyncio.Task[T], wait_s: float) -> bool:
    """True if the request is unfinished after `wait_s`.

    Results that stopped processes had already sent arrive in that time.
    """
    await asyncio.wait([asking], timeout=wait_s)
    return not asking.done()


async def result(task: asyncio.Task[T]) -> T:
    """Await a task and return its result."""
    return await task


@cache
def settle() -> None:
    """Exempt all objects that exist after an engine's start from garbage collection.

    Scanning what was imported takes a third of a second each time, in which engines continue to generate.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries complain about objects left at exit
