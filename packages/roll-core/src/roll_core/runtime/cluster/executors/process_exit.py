"""Why a worker's process is gone, from what is left of it: Ray's words, its own last ones, the kernel's count."""

from __future__ import annotations

import re

from roll_core.errors import EngineDiedError
from roll_core.runtime.cluster.executors.isolated_env_process import ProcessEndedError

LONGEST_WORDS = 300
_CRASH = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_NODE_DIED = re.compile(r"its node has died.*?node was terminated[^:]*: (?P<why>[^\n]+)", re.DOTALL)
_EXIT_DETAIL = re.compile(r"Worker exit detail: (.+?)(Some common causes|There are some|$)")


def cause_of_death(error: BaseException, *, pid: int, trace: str, oom_kills: int) -> str:
    """On one line. `error` is what Ray raised, or the worker of a dead engine; `pid` is 0 for a process that never said
    who it is; `trace` is what it wrote itself when it crashed; `oom_kills` are processes that the kernel of its host
    has killed meanwhile for want of memory."""
    process = f"process {pid}"
    if isinstance(error, EngineDiedError):
        return str(error)
    if lost := _NODE_DIED.search(str(error)):
        return f"its host is gone or cannot be reached, says Ray: {lost['why'].strip()}"
    if not pid:
        return f"its process did not start: {_first_words(error)}"
    if crash := _CRASH.search(trace):
        return f"{process} crashed: {crash[1]}"
    if isinstance(ended := getattr(error, "cause", None), ProcessEndedError):
        return f"{process} {ended}"
    if oom_kills > 0:
        return f"{process} is gone, and the kernel killed {oom_kills} processes for want of memory (SIGKILL)"
    return f"{process} is gone, most likely killed (SIGKILL): {_first_words(error)}"


def _first_words(error: BaseException) -> str:
    """The part of Ray's message that says what happened."""
    text = str(error).strip() or type(error).__name__
    detail = _EXIT_DETAIL.search(text)
    words = " ".join((detail[1] if detail else text).split())
    return words if len(words) <= LONGEST_WORDS else words[: LONGEST_WORDS - 1] + "…"
