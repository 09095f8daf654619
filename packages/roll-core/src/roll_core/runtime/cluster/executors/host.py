"""What holds one worker: makes it, runs its sync methods on its one thread and its async methods on the event loop.

    event loop ── begin("forward") ──► queue ──► the worker's thread: object.forward(...) ──► future on the loop
               └─ begin("generate") ─► task on the loop: await object.generate(...)

Strategies are single-threaded (some libraries insist on the thread that loaded them), so making the worker, its sync
methods and a sync `close` share the one thread, first come first served.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import queue
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

from roll_core import openmp
from roll_core.plugins.targets import load_target
from roll_core.runtime.cluster.executors.calls import CallFailed, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from roll_core.runtime.cluster.executors.base import Peers
    from roll_core.runtime.cluster.placement import Place

log = logging.getLogger(__name__)
T = TypeVar("T")


class WorkerHost:
    """One worker of a role. All methods are called on one event loop."""

    def __init__(self, role: str, rank: int) -> None:
        self.name = f"{role}[{rank}]"
        self._thread = WorkerThread(self.name)
        self._worker: Any = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def make(self, target: str, place: Place, peers: Peers, args: Mapping[str, Any]) -> None:
        """Import the class and construct the worker, on its thread. Raises `CallFailed`."""

        def construct() -> Any:
            worker_class = load_target(target, owner="worker class")
            return worker_class(place=place, peers=peers, **args)

        self._worker = await self._thread.run(construct)

    def begin(self, method: str, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Begin a call; the future gives its result or raises `CallFailed`.

        Cancelling the future cancels an async method; a sync one goes on, and its result is dropped.
        """
        try:
            bound = getattr(self._worker, method)
        except AttributeError as error:
            return self._failed(error)
        if inspect.iscoroutinefunction(bound):
            task = asyncio.get_running_loop().create_task(_awaited(bound, args), name=f"{self.name}.{method}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return task
        return self._thread.run(bound, *args)

    def stack(self) -> str:
        """Where the worker's thread is right now, what its async methods wait for, and where the other threads of its
        process are, as those of engines."""
        frames = [self._thread.stack()]
        for task in self._tasks:
            frames += [f"{task.get_name()}:\n{''.join(traceback.format_stack(frame))}" for frame in task.get_stack()]
        mine = {self._thread.ident, threading.get_ident()}
        return "\n".join(frames + [_stack_of(each) for each in threading.enumerate() if each.ident not in mine])

    async def close(self, timeout_s: float) -> None:
        """Close the worker and end its thread. Errors are logged. Gives up on a thread that is busy for so long."""
        for task in list(self._tasks):
            task.cancel()
        close = getattr(self._worker, "close", None)
        if close is not None:
            closing = self.begin("close", ())
            try:
                await asyncio.wait_for(closing, timeout_s)
            except CallFailed as failed:
                log.warning("%s: close failed: %s", self.name, failed.failure.summary, exc_info=failed.failure.error)
            except TimeoutError:
                log.warning("%s: did not close within %g s", self.name, timeout_s)
        self._worker = None
        self._thread.stop()

    def _failed(self, error: Exception) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_exception(CallFailed(Failure.of(error)))
        return future


class WorkerThread:
    """Runs functions one after the other. A daemon thread, so that Ctrl-C need not wait for a long function."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run it after everything asked for before. The future raises `CallFailed`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def answer(settle: Callable[[Any], None], outcome: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it everyone who waited
                loop.call_soon_threadsafe(lambda: None if future.done() else settle(outcome))

        def work() -> None:
            try:
                result = function(*args)
            except BaseException as error:  # whatever it is, SystemExit included: the caller learns it
                answer(future.set_exception, CallFailed(Failure.of(error)))
            else:
                answer(future.set_result, result)

        self._queue.put(work)
        return future

    @property
    def ident(self) -> int | None:
        """As Python knows it."""
        return self._thread.ident

    def stop(self) -> None:
        """End after what was asked for so far."""
        self._queue.put(None)

    def stack(self) -> str:
        """Where it is right now."""
        return _stack_of(self._thread)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work
            if self._queue.empty():
                try:
                    openmp.rest()
                except Exception:  # the thread must go on serving
                    log.exception("%s: OpenMP's threads could not be put to rest", self._thread.name)


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name}:\n{''.join(traceback.format_stack(frame))}" if frame else ""


async def _awaited(method: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...]) -> T:
    """Calls the method itself: of a task that is cancelled before it begins no coroutine must be left over."""
    try:
        return await method(*args)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise CallFailed(Failure.of(error)) from error
    except Exception as error:
        raise CallFailed(Failure.of(error)) from error
