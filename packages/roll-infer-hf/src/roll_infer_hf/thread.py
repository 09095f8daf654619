"""The thread on which the embedded engine computes."""

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
    """Runs functions one after the other, on one thread. Unlike that of a `ThreadPoolExecutor` it is a daemon: where it
    hangs the process can still end."""

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
                except BaseException as error:  # whatever it is, the caller learns it
                    future.set_exception(error)
            del asked, future, work
