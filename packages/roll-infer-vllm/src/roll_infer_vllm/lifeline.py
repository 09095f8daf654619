"""Parent watchdog: engine processes exit when the worker that started them exits, for any reason.

vLLM ends its processes when the worker shuts down properly. But if the worker is killed, an idle engine waits for
requests forever and keeps its memory. Therefore each engine process watches the worker through a pidfd, which the
kernel signals when the worker exits.

`PR_SET_PDEATHSIG` does not work here: it fires when the *thread* that started the process ends, and the threads of an
event loop's executor end before the worker does.
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
"""Environment variable of the engine processes with the worker's process id."""


def owned() -> Mapping[str, str]:
    """Environment variables for processes that must exit with this process."""
    return {OWNER: str(os.getpid())}


def end_with_owner() -> None:
    """Start a thread that kills this process when the worker exits; does nothing outside of engine processes.

    Called in each engine process before it loads anything. Repeated calls are harmless.
    """
    owner = int(os.environ.get(OWNER, "0"))
    if owner in (0, os.getpid()):
        return
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:  # the worker exited while this process was starting
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
    """Kill this process with SIGKILL: no caller is left for an orderly shutdown, and others need its device memory."""
    os.kill(os.getpid(), signal.SIGKILL)
