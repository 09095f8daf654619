"""Liveness: engine processes exit with the worker, and the worker gets `EngineDiedError` if the engine exits.

vLLM ends its processes when the worker shuts down properly. But if the worker is killed, an idle engine waits for
requests forever and keeps its memory. Therefore each engine process watches the worker through a pidfd, which the
kernel signals when the worker exits.

`PR_SET_PDEATHSIG` does not work here: it fires when the *thread* that started the process ends, and the threads of an
event loop's executor end before the worker does.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import select
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from roll_core.errors import EngineDiedError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

PARENT = "ROLL_VLLM_PARENT"
"""Environment variable of the engine processes with the worker's process id."""
POLL_S = 1.0
"""Seconds between two checks whether the engine is alive."""


def exit_with_parent() -> None:
    """Start a thread that kills this process when the worker exits; does nothing outside of engine processes.

    The process also skips the last garbage collections of an orderly exit. They would scan all that vLLM imported, and
    the kernel frees the memory anyway.

    Called in each engine process before it loads anything. Repeated calls are harmless.
    """
    parent = int(os.environ.get(PARENT, "0"))
    if parent in (0, os.getpid()):
        return
    atexit.register(gc.freeze)
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:  # the worker exited while this process was starting
        _kill()
        return
    threading.Thread(target=_wait, args=(descriptor,), name="roll-watchdog", daemon=True).start()


def _wait(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not poll.poll():
        pass
    _kill()


def _kill() -> None:
    """Kill this process with SIGKILL: no caller is left for an orderly shutdown, and others need its device memory."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def engine_errors() -> Iterator[None]:
    """Context manager that raises `EngineDiedError` in place of vLLM's `EngineDeadError`."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise engine_died() from error


async def while_alive(engine: AsyncLLM, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` and return its result. Raises `EngineDiedError` if the engine exits or fails meanwhile.

    In that case vLLM fails running requests, but its other calls block forever.
    """
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=POLL_S))[0]:
            if engine.errored:
                raise engine_died()
        with engine_errors():
            return task.result()
    finally:
        task.cancel()


def engine_died() -> EngineDiedError:
    """The error of an engine whose process has exited."""
    return EngineDiedError("vLLM's engine process has exited; vLLM logged the reason above")
