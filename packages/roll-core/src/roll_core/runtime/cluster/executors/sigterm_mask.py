"""SIGTERM is for the driver, also where it is sent to every process of a group or of a job.

The driver then ends the step in progress, for which it needs its workers, and Ray.

    driver ── starts, with SIGTERM blocked ──► Ray's processes ──► workers' processes: they inherit the block
                                                                       └─ handle SIGTERM by doing nothing, and lift the
                                                                          block: their own children shall not inherit it
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def children_deaf_to(number: signal.Signals) -> Iterator[None]:
    """Processes that this thread starts meanwhile, and theirs, never get the signal: it is blocked in them.

    They end by SIGKILL, and by themselves.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def be_deaf_to(number: signal.Signals) -> None:
    """The signal does nothing to this process any more; it may still end those that this thread, and threads that it
    starts, start.

    Python lets only the main thread set a handler, and that one is Ray's. The handler that faulthandler sets from any
    thread writes a traceback, here to nowhere.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)  # open for the life of the process
    faulthandler.register(number, file=nowhere, all_threads=False, chain=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
