"""Single-thread executor of the embedded engine."""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable


class EngineThread(Executor):
    """Executor that runs functions one after the other on one daemon thread.

    Unlike the threads of a `ThreadPoolExecutor`, a daemon thread that hangs does not prevent the process from exiting.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.put((future, partial(fn, *args, **kwargs)))
        return future

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _serve(self) -> None:
        while (asked := self._queue.get()) is not None:
            future, work = asked
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # every error is raised to the caller
                    future.set_exception(error)
            del asked, future, work
