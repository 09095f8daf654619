"""Keeps SIGTERM away from Ray and the workers, even if it is sent to every process of a group or job.

Only the driver handles it: it ends the step in progress, for which it needs its workers, and then Ray.

    driver ── starts, with SIGTERM blocked ──► Ray's processes ──► workers' processes: they inherit the block
                                                                       └─ handle SIGTERM by doing nothing, and lift the
                                                                          block, so their children do not inherit it
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
    """Block the signal in processes that this thread starts within the `with` statement, and in their descendants.

    Such processes end by SIGKILL or by themselves.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def be_deaf_to(number: signal.Signals) -> None:
    """Ignore the signal in this process. Children of this thread, and of threads that it starts, still receive it.

    Python lets only the main thread set a handler, and Ray owns that thread. faulthandler sets its handler from any
    thread; it writes a traceback, here to the null device.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)  # stays open for the life of the process
    faulthandler.register(number, file=nowhere, all_threads=False, chain=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
