"""Waiting for several things at once, so that the first failure is the one that is seen; and for a thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

T = TypeVar("T")


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. When one fails the others are cancelled, awaited, and the first failure is raised as it is."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def in_daemon_thread(function: Callable[[], T], *, name: str) -> T:
    """What it returns. Who is cancelled leaves it to itself, and the process does not wait for it to end."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:  # whatever it is, the one who waits learns it
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)
