"""asyncio tasks and daemon threads whose exceptions are always reported.

`gather` raises the first exception of several tasks. An exception in a `background` task ends the run:

    background(work) ──┐
    call_soon, done ───┴─ raises ─► the loop's exception handler ─► `end_on_failure`: the run ends with the exception
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from typing import Any

log = logging.getLogger(__name__)
T = TypeVar("T")

_OURS = {"roll_core"}
"""Packages whose loop callbacks end the run if they fail."""
_UNAWAITED = "roll_unawaited"
"""Key that marks the exception-handler context of a failed `background` task."""


def background(work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
    """Start a task that no caller awaits.

    The caller keeps the task in order to cancel it. An exception in it ends the run.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler(
            {"message": f"{task.get_name()} failed", "exception": error, "task": task, _UNAWAITED: True}
        )


def end_on_failure(end: Callable[[BaseException], None]) -> None:
    """Call `end` with the exception of a failed `background` task, or of a failed loop callback of ROLL, on this loop.

    Every other context, for example a failed task of an inference engine, goes to asyncio's default handler, which logs
    it.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException) and (_UNAWAITED in context or ("handle" in context and _is_ours(error))):
            log.error("%s", context["message"])
            end(error)
        else:
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(handle)


def end_on_callbacks_of(module: str) -> None:
    """Let failed loop callbacks of the module's package end the run, as those of roll-core do."""
    _OURS.add(module.partition(".")[0])


def _is_ours(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").partition(".")[0] in _OURS for frame, _ in frames)


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in the order of `coroutines`.

    If one fails, cancels the others, awaits them, and raises the first exception unchanged.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel_all(tasks)
        raise


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until all of them have ended. Their exceptions are ignored."""
    stopped = list(tasks)
    for task in stopped:
        task.cancel()
    await asyncio.gather(*stopped, return_exceptions=True)


async def in_daemon_thread(function: Callable[[], T], *, name: str) -> T:
    """Run `function` in a daemon thread and return its result, or raise its exception.

    Cancelling the caller does not stop the function. The process does not wait for the thread at exit.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:  # SystemExit included: the awaiting caller receives it
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)
