"""Wall time of a run by stage. Stages may nest and run concurrently; each second is counted once.

    with ledger.stage("rollout"):            rollout |====------====|        self time only: time inside `reward`
        with ledger.stage("reward"):         reward       |======|           is not counted for `rollout`

If several tasks have open stages, the innermost stages of the tasks share the time equally, by name. The rows therefore
add up to the wall time under any concurrency. Time outside all stages is the row `other`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """Time, share and token count of one stage."""

    stage: str
    seconds: float
    share: float
    """Fraction of the run's wall time, 0 to 1."""
    entries: int
    """How often the stage was entered."""
    tokens: int = 0
    """Tokens counted for the stage; see `Ledger.count_tokens`."""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of the stage's time; None if no tokens were counted."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None


@dataclass(slots=True, eq=False)
class _OpenStage:
    """An open stage of one task."""

    name: str
    parent: _OpenStage | None
    """The stage in which this one was opened; it may have been closed since."""


class Ledger:
    """Time ledger of one run, kept by its driver. Safe to use from several tasks and threads."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        before_s: float = 0.0,
        on_change: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`before_s`: seconds that already passed, counted in the row `start-up`; see `process_age_s`.

        `on_change` is called whenever a stage begins or ends, with the name of the current stage, for the console. The
        name is empty outside all stages.
        """
        self._on_change = on_change
        self.observe: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext
        """Context manager that is entered with the name of each stage, around it. For trackers that record spans."""
        self._clock = clock
        self._lock = threading.Lock()
        self._current: ContextVar[_OpenStage | None] = ContextVar("stage", default=None)
        self._open: list[_OpenStage] = []
        self._seconds: dict[str, float] = {}
        self._entries: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._begin = self._settled = clock()
        self._before_s = before_s
        if before_s:
            self._seconds["start-up"] = before_s
            self._entries["start-up"] = 1
        self._mark = self._begin
        self._at_mark: dict[str, float] = {}
        self._tokens_at_mark: Counter[str] = Counter()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Attribute the time inside to `name`, except for the time of nested stages."""
        parent = self._current.get()
        with self._lock:
            while parent is not None and parent not in self._open:  # this task outlived the stage that started it
                parent = parent.parent
            stage = _OpenStage(name, parent)
            self._settle()
            self._open.append(stage)
            self._entries[name] += 1
        self._current.set(stage)
        self._on_change(name)
        try:
            with self.observe(name):
                yield
        finally:
            with self._lock:
                self._settle()
                self._open.remove(stage)
                if parent is not None and parent in self._open:
                    current = parent.name
                else:
                    current = next(reversed(self._innermost()), "")
            self._current.set(parent)
            self._on_change(current)

    def count_tokens(self, stage: str, tokens: int) -> None:
        """Add tokens that `stage` processed. The stage `step` stands for the whole step."""
        with self._lock:
            self._tokens[stage] += tokens

    def start_step(self) -> None:
        """Mark the start of a step, from which `step_times` counts."""
        with self._lock:
            self._settle()
            self._mark = self._settled
            self._at_mark = dict(self._seconds)
            self._tokens_at_mark = self._tokens.copy()

    def step_times(self) -> dict[str, float]:
        """Metrics of the time since `start_step`.

        `time/<stage>` is self time in seconds; together with `time/other` the stages add up to `time/step`.
        `tokens_per_s/<stage>` is given if tokens were counted.
        """
        with self._lock:
            self._settle()
            step_s = self._settled - self._mark
            times = {name: seconds - self._at_mark.get(name, 0.0) for name, seconds in self._seconds.items()}
            times = {name: spent for name, spent in times.items() if spent > 0}
            times[OTHER] = max(0.0, step_s - sum(s for name, s in times.items() if name != OTHER))
            metrics = {f"time/{name}": seconds for name, seconds in times.items()}
            metrics["time/step"] = step_s
            for name, tokens in self._tokens.items():
                spent = step_s if name == "step" else times.get(name, 0.0)
                new = tokens - self._tokens_at_mark[name]
                if new and spent > 0:
                    metrics[f"tokens_per_s/{name}"] = new / spent
            return metrics

    def rows(self) -> list[LedgerRow]:
        """All stages, longest first and `other` last. The seconds add up to the wall time so far."""
        with self._lock:
            self._settle()
            wall = self._settled - self._begin + self._before_s
            seconds = {name: s for name, s in self._seconds.items() if name != OTHER}
            seconds[OTHER] = max(0.0, wall - sum(seconds.values()))
            order = sorted(seconds, key=lambda name: (name == OTHER, -seconds[name]))
            return [
                LedgerRow(
                    stage=name,
                    seconds=seconds[name],
                    share=seconds[name] / wall if wall > 0 else 0.0,
                    entries=self._entries[name],
                    tokens=self._tokens[name],
                )
                for name in order
            ]

    def _settle(self) -> None:
        """Split the time since the last change equally among the stages that were innermost."""
        now = self._clock()
        elapsed, self._settled = now - self._settled, now
        innermost = self._innermost()
        for name in innermost if elapsed > 0 else ():
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed / len(innermost)

    def _innermost(self) -> list[str]:
        """Names of the open stages in which no stage is open, in the order in which they were opened."""
        parents = {id(stage.parent) for stage in self._open}
        return list(dict.fromkeys(stage.name for stage in self._open if id(stage) not in parents))


def process_age_s() -> float:
    """Seconds since this process was started: the `before_s` of a ledger if the process executes a single run.

    On Linux, uses the clock of process start times (`CLOCK_BOOTTIME`); psutil's epoch time is off by up to a second.
    """
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):  # not Linux
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    return max(0.0, time.time() - psutil.Process().create_time())
