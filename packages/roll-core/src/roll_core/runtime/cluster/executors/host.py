"""Runs one worker: constructs it, runs sync methods on its dedicated thread and async methods on the event loop.

    event loop ── begin("forward") ──► queue ──► the worker's thread: object.forward(...) ──► future on the loop
               └─ begin("generate") ─► task on the loop: await object.generate(...)

Strategies are single-threaded: some libraries require the thread that loaded them. The constructor, the sync methods
and a sync `close` therefore share one thread, in the order of the calls.
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
from roll_core.runtime.cluster.concurrency import in_daemon_thread
from roll_core.runtime.cluster.executors.base import CallFailed, Failure
from roll_core.spec.pipeline import TraceContext

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from roll_core.runtime.cluster.executors.base import Peers
    from roll_core.runtime.cluster.placement import Place
    from roll_core.spec.pipeline import WorkerSpans

log = logging.getLogger(__name__)
T = TypeVar("T")


class WorkerHost:
    """One worker of a role. All methods are called on one event loop."""

    def __init__(self, role: str, rank: int) -> None:
        self.name = f"{role}[{rank}]"
        self._role, self._rank = role, rank
        self._spans: dict[str, WorkerSpans | None] = {}
        """By the target of the context that a call carries; None if it cannot be loaded."""
        self._thread = WorkerThread(self.name)
        self._worker: Any = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def construct(self, target: str, place: Place, peers: Peers, args: Mapping[str, Any]) -> None:
        """Import the class and construct the worker on its thread. Raises `CallFailed`."""

        def build() -> Any:
            return load_target(target, owner="worker class")(place=place, peers=peers, **args)

        self._worker = await self._thread.run(build)

    def begin(self, method: str, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Begin a call. The future returns its result or raises `CallFailed`.

        Cancelling the future cancels an async method. A sync method continues, and its result is dropped. If the first
        argument is a `TraceContext`, the call is recorded as a span.
        """
        try:
            bound = getattr(self._worker, method)
        except AttributeError as error:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.set_exception(CallFailed(Failure.of(error)))
            return future
        if args and isinstance(args[0], TraceContext):
            bound, args = self._recorded(bound, f"{self._role}.{method}", args[0]), args[1:]
        if inspect.iscoroutinefunction(bound):
            task = asyncio.get_running_loop().create_task(_awaited(bound, args), name=f"{self.name}.{method}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return task
        return self._thread.run(bound, *args)

    def _recorded(self, bound: Callable[..., Any], name: str, trace: TraceContext) -> Callable[..., Any]:
        """The method, recorded as a span. A worker whose environment lacks the tracker's library records none."""
        if trace.target not in self._spans:
            self._spans[trace.target] = None
            try:
                spans_class = load_target(trace.target, owner="the tracker's spans")
                self._spans[trace.target] = spans_class(self._role, self._rank, trace.options)
            except Exception as error:
                log.warning("%s: its calls are not recorded as spans: %s", self.name, error)
        spans = self._spans[trace.target]
        if spans is None:
            return bound
        if inspect.iscoroutinefunction(bound):

            async def awaited(*args: Any) -> Any:
                with spans.call(name, trace.parent):
                    return await bound(*args)

            return awaited

        def called(*args: Any) -> Any:
            with spans.call(name, trace.parent):
                return bound(*args)

        return called

    def stack(self) -> str:
        """Current stacks of the worker's thread, its running async methods, and all other threads of the process.

        The other threads include those of engines.
        """
        frames = [_stack_of(self._thread.thread)]
        for task in self._tasks:
            frames += [f"{task.get_name()}:\n{''.join(traceback.format_stack(frame))}" for frame in task.get_stack()]
        mine = {self._thread.thread.ident, threading.get_ident()}
        return "\n".join(frames + [_stack_of(thread) for thread in threading.enumerate() if thread.ident not in mine])

    async def close(self, timeout_s: float) -> None:
        """Close the worker and stop its thread. Errors are logged. Stops waiting after `timeout_s` seconds."""
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
                log.warning("%s: close did not return within %g s", self.name, timeout_s)
        for spans in filter(None, self._spans.values()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(in_daemon_thread(spans.close, name=f"{self.name} sends its spans"), timeout_s)
        self._worker = None
        self._thread.stop()


class WorkerThread:
    """Runs functions one after the other. A daemon thread, so Ctrl-C does not wait for a long function."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run a function after all earlier ones. The future raises `CallFailed`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(setter: Callable[[Any], None], outcome: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller is left
                loop.call_soon_threadsafe(lambda: None if future.done() else setter(outcome))

        def work() -> None:
            try:
                result = function(*args)
            except BaseException as error:  # SystemExit included: the caller receives it
                settle(future.set_exception, CallFailed(Failure.of(error)))
            else:
                settle(future.set_result, result)

        self._queue.put(work)
        return future

    def stop(self) -> None:
        """Stop the thread after the functions that are already queued."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work
            if self._queue.empty():
                try:
                    openmp.rest()
                except Exception:  # the thread must continue to serve
                    log.exception("%s: its OpenMP threads could not be released", self.thread.name)


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name}:\n{''.join(traceback.format_stack(frame))}" if frame else ""


async def _awaited(method: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...]) -> T:
    """Await a method and convert its exception to `CallFailed`.

    Calls the method inside the task: a task that is cancelled before it begins then leaves no unawaited coroutine.
    """
    try:
        return await method(*args)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise CallFailed(Failure.of(error)) from error
    except (Exception, SystemExit) as error:  # in a task, SystemExit would end the event loop: here, the whole run
        raise CallFailed(Failure.of(error)) from error
