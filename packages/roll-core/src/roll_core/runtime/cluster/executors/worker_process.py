"""Processes of workers: their signals, log and crash report, and the cause of an exit.

SIGTERM must not reach Ray and the workers, even if it is sent to every process of a group or job. Only the driver
handles it: it ends the step in progress, for which it needs its workers, and then Ray.

    driver ── starts, with SIGTERM blocked ──► Ray's processes ──► workers' processes: they inherit the block
                                                                       └─ ignore SIGTERM and lift the block, so their
                                                                          children do not inherit it
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.errors import EngineDiedError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_QUOTE = 300
"""Maximum length of Ray's message in a cause, in characters."""
_CRASH = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_NODE_DIED = re.compile(r"its node has died.*?node was terminated[^:]*: (?P<why>[^\n]+)", re.DOTALL)
_EXIT_DETAIL = re.compile(r"Worker exit detail: (.+?)(Some common causes|There are some|$)")


class ProcessEndedError(Exception):
    """A process of its own interpreter exited: `was killed by SIGKILL`, `exited with code 1`. Internal to executors."""


@contextlib.contextmanager
def sigterm_blocked_in_children() -> Iterator[None]:
    """Block SIGTERM in processes that this thread starts within the `with` statement, and in their descendants."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_sigterm() -> None:
    """Ignore SIGTERM in this process. Children of this thread, and of threads that it starts, still receive it.

    Python lets only the main thread set a handler, and Ray owns that thread. faulthandler sets its handler from any
    thread; it writes a traceback, here to the null device.
    """
    null = os.open(os.devnull, os.O_WRONLY)  # stays open for the life of the process
    faulthandler.register(signal.SIGTERM, file=null, all_threads=False, chain=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def prepare_process(name: str, level: int, crash_file: str = "") -> None:
    """Set up the log and signals of a worker's process, and the file for its crash report."""
    logging.basicConfig(level=level, format=f"%(levelname)s {name} %(name)s: %(message)s", force=True)
    ignore_sigterm()
    if crash_file and Path(crash_file).parent.is_dir():
        # The file stays open for the life of the process: the signal handler writes the crash report to it.
        faulthandler.enable(Path(crash_file).open("w"))  # noqa: SIM115


def exit_cause(error: BaseException, *, pid: int, trace: str, oom_kills: int) -> str:
    """Cause of a worker's exit, in one line.

    `error` is the exception that Ray raised, or the `EngineDiedError` of the worker. `pid` is 0 if the process never
    reported one. `trace` is the crash report that the process wrote. `oom_kills` is the number of processes that the
    kernel of its host has killed for lack of memory since the worker started.
    """
    process = f"process {pid}"
    if isinstance(error, EngineDiedError):
        return str(error)
    if lost := _NODE_DIED.search(str(error)):
        return f"Ray reports that its host is lost or unreachable: {lost['why'].strip()}"
    if not pid:
        return f"its process did not start: {_quote(error)}"
    if crash := _CRASH.search(trace):
        return f"{process} crashed: {crash[1]}"
    if isinstance(ended := getattr(error, "cause", None), ProcessEndedError):
        return f"{process} {ended}"
    if oom_kills > 0:
        return f"{process} exited, and the kernel killed {oom_kills} processes for lack of memory (SIGKILL)"
    return f"{process} exited, most likely killed (SIGKILL): {_quote(error)}"


def _quote(error: BaseException) -> str:
    """Part of Ray's message that describes the event."""
    text = str(error).strip() or type(error).__name__
    detail = _EXIT_DETAIL.search(text)
    words = " ".join((detail[1] if detail else text).split())
    return words if len(words) <= MAX_QUOTE else words[: MAX_QUOTE - 1] + "…"
