"""No engine outlives the worker that started it, however the worker ended.

vLLM ends its processes when the one that started them shuts down. Where that one is killed outright, an engine that is
idle waits for requests for ever, with its memory. So each of the engine's processes watches the worker: the kernel
tells when it is gone, which needs nobody to do anything at the end.

(`PR_SET_PDEATHSIG` would not do: it speaks of the *thread* that started a process, and the threads of an event loop's
executor end before the worker does.)
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

OWNER = "ROLL_VLLM_OWNER"
"""Environment variable of the engine's processes: the worker's process id."""


def owned() -> Mapping[str, str]:
    """What to set for processes that shall end with this one."""
    return {OWNER: str(os.getpid())}


def end_with_owner() -> None:
    """Called in each of the engine's processes before it loads anything; does nothing in others. May be called again:
    further watchers wait for the same end."""
    owner = int(os.environ.get(OWNER, "0"))
    if owner in (0, os.getpid()):
        return
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:  # gone while this process was being started
        _end()
        return
    threading.Thread(target=_wait, args=(descriptor,), name="roll-lifeline", daemon=True).start()


def _wait(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not poll.poll():
        pass
    _end()


def _end() -> None:
    """At once: whoever would have waited for something in order is gone, and its device memory is wanted."""
    os.kill(os.getpid(), signal.SIGKILL)
