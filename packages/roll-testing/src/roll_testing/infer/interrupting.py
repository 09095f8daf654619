"""Requests that have to be under way when something happens to them.

A process may be kept waiting for seconds between two lines of a test, in which an engine answers in full. Then the
request is asked anew; an engine that never is interrupted is found by the last answer.
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
    """What the first attempt has found that was not answered before it was interrupted, or the last of all."""
    for _ in range(ATTEMPTS - 1):
        found = attempt()
        if not missed(found):
            return found
    return attempt()


def was_whole(completion: Completion, num: int, version: int) -> bool:
    """Whether all outputs have all of `num` tokens, which these weights have drawn."""
    return all(
        output.finish_reason == "length" and output.versions.tolist() == [version] * num
        for output in completion.outputs
    )


@contextlib.contextmanager
def stopped(processes: Sequence[int]) -> Iterator[None]:
    """They do not run meanwhile, and may have ended in the end."""
    for each in processes:
        os.kill(each, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGCONT)


async def is_open(asking: asyncio.Task[T], wait_s: float) -> bool:
    """Whether it is not answered by what processes that are stopped had sent, which takes so long to arrive."""
    await asyncio.wait([asking], timeout=wait_s)
    return not asking.done()


async def result(task: asyncio.Task[T]) -> T:
    """What it comes to."""
    return await task


@cache
def settle() -> None:
    """Once an engine has been started: what was imported for it is not looked through for garbage again and again, for
    a third of a second each time, in which engines go on drawing."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries complain of what is left at the end
