"""Cause of a worker's exit, from Ray's message, the crash report and the kernel's count of OOM kills."""

from __future__ import annotations

import re
from pathlib import Path

from roll_core.errors import EngineDiedError
from roll_core.runtime.cluster.executors.worker_process import ProcessEndedError

MAX_QUOTE = 300
"""Maximum length of Ray's message in a cause, in characters."""
_CRASH = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_NODE_DIED = re.compile(r"its node has died.*?node was terminated[^:]*: (?P<why>[^\n]+)", re.DOTALL)
_EXIT_DETAIL = re.compile(r"Worker exit detail: (.+?)(Some common causes|There are some|$)")


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


def num_oom_kills() -> int:
    """Number of OOM kills on this host since its kernel started; 0 if unknown."""
    try:
        counts = dict(line.split(maxsplit=1) for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))


def _quote(error: BaseException) -> str:
    """Part of Ray's message that describes the event."""
    text = str(error).strip() or type(error).__name__
    detail = _EXIT_DETAIL.search(text)
    words = " ".join((detail[1] if detail else text).split())
    return words if len(words) <= MAX_QUOTE else words[: MAX_QUOTE - 1] + "…"
