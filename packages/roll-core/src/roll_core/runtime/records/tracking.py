"""Metrics of a run: `metrics.jsonl` always, and the trackers in `track_with`.

metrics of step n  ─►  MetricsFile ─► metrics.jsonl    {"step": n, "time": …, "score/mean": …, …}
                   └►  Trackers    ─► tensorboard, …
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

from roll_core.errors import TrackerError
from roll_core.runtime.records.run_files import LineWriter, copy_lines, number, read_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from roll_core.spec.pipeline import TraceContext, Tracker

logger = logging.getLogger(__name__)

TRACE: ContextVar[TraceContext | None] = ContextVar("trace", default=None)
"""The context that calls of workers carry. A stage sets it if a tracker records spans."""

_LOWER = ("loss", "nll", "perplexity", "/kl", "kl/", "divergence", "failures", "retries", "approx_kl")
_DURATION = re.compile(r"(?:\A|/)(?:time|seconds|\w+_s|\w+_seconds)(?:/|\Z)")
"""Names of durations and of rates per second: they have a part that is `time` or `seconds`, or ends with `_s`."""
_BY_ARRIVAL = ("engine/", "checkpoint_store/")


class MetricsFile(LineWriter):
    """Writes `metrics.jsonl`, one line per step. The line is in the file as soon as `log` returns."""

    def __init__(self, path: Path, *, history: Path | None = None, resumed_step: int = 0) -> None:
        """Open `path`, and warn about steps that `history` lacks; see `LineWriter`."""
        super().__init__(path, history=history, resumed_step=resumed_step)
        self._copied = {row["step"] for row in read_lines(path)} if history is not None else set()
        if history is not None and (lost := set(range(1, resumed_step + 1)) - self._copied):
            message = "%s lacks %d of the %d steps before this run. The curves of this run lack them too: steps %s"
            logger.warning(message, history / path.name, len(lost), resumed_step, ranges(lost))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of step `step`, or extend the line that was copied for it from `history`.

        Raises `ValueError` if a metric is named `step` or `time`.
        """
        if reserved := {"step", "time"} & metrics.keys():
            raise ValueError(f"a metric cannot be named {reserved.pop()!r}: metrics.jsonl has a field of that name")
        if step not in self._copied:
            self.append({"step": step, "time": round(time.time(), 3), **metrics})
            return
        self.close()
        copy_lines(self.path, self.path, lambda row: _joined(row, metrics) if row["step"] == step else row)
        self._open()


def _joined(row: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, Any]:
    """Merge further metrics of a step into its line. Adds up `time/` metrics and replaces others."""
    seconds = {
        name: value + earlier
        for name, value in metrics.items()
        if name.startswith("time/") and (earlier := number(row.get(name))) is not None
    }
    return {**row, **metrics, **seconds}


def ranges(steps: Iterable[int]) -> str:
    """Format step numbers as ranges, such as `1–3, 5`."""
    spans: list[list[int]] = []
    for step in sorted(steps):
        if spans and spans[-1][-1] == step - 1:
            spans[-1] = [spans[-1][0], step]
        else:
            spans.append([step, step])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in spans)


def repeatable(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a run with the same seed reproduces bit for bit.

    Omits durations, and metrics of engines and of the checkpoint store, because batching, waiting, caching and copying
    depend on the clock.
    """
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith(_BY_ARRIVAL) and _DURATION.search(name) is None
    }


def is_lower_better(name: str) -> bool:
    """True if `save_best` minimises a metric by default: losses, perplexities, divergences and failures."""
    return any(word in name for word in _LOWER)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read a `metrics.jsonl` into one mapping per step, ordered by step, with `step` and `time`.

    Later lines of a step update earlier ones. Works for running and crashed runs.
    """
    steps: dict[int, dict[str, float]] = {}
    for row in read_lines(path):
        step = row.get("step")
        if isinstance(step, int):
            numbers = {name: value for name, raw in row.items() if (value := number(raw)) is not None}
            steps.setdefault(step, {}).update(numbers)
    return [steps[step] for step in sorted(steps)]


class Trackers:
    """A group of trackers. Each tracker is closed exactly once, even if another one fails."""

    def __init__(self) -> None:
        """Create an empty group; see `opened`."""
        self._open: dict[str, Tracker] = {}
        self._deferred: TrackerError | None = None

    @classmethod
    def opened(cls, factories: Mapping[str, Callable[[], Tracker]]) -> Self:
        """Open trackers, each under a name for messages: `tracker 'wandb' of roll-trackers 0.1.0`.

        If one cannot be opened, closes the earlier ones and raises `TrackerError`.
        """
        trackers = cls()
        try:
            for name, factory in factories.items():
                with _errors_of(name, "could not be opened"):
                    trackers._open[name] = factory()
        except TrackerError:
            with contextlib.suppress(TrackerError):
                trackers.close()
            raise
        return trackers

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the resolved config, without secrets, to all trackers. Raises `TrackerError` at the first failure."""
        for name, tracker in self._open.items():
            with _errors_of(name, "failed to record the config"):
                tracker.log_config(config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics to all trackers. Raises `TrackerError` with the tracker's name at the first failure."""
        for name, tracker in self._open.items():
            with _errors_of(name, f"failed to record step {step}"):
                tracker.log(step, metrics)
        self._raise_deferred()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Enter the stage of all trackers, for `Ledger.observe`.

        The next `log`, or `finish`, raises the error of a tracker: code inside the stage must not get it.
        """
        with contextlib.ExitStack() as stack:
            for owner, tracker in self._open.items():
                stack.enter_context(self._in_stage(tracker, name, owner))
            yield

    @contextlib.contextmanager
    def _in_stage(self, tracker: Tracker, name: str, owner: str) -> Iterator[None]:
        from roll_core.spec.pipeline import TraceContext  # not imported by commands that only read metrics

        entered, outer = None, TRACE.get()
        with self._deferred_errors_of(owner, name):
            stage = tracker.stage(name)
            context = stage.__enter__()
            entered = stage
            if isinstance(context, TraceContext):
                TRACE.set(context)
        try:
            yield
        finally:
            TRACE.set(outer)
            if entered is not None:
                raised = sys.exc_info()
                with self._deferred_errors_of(owner, name):
                    entered.__exit__(*raised)

    @contextlib.contextmanager
    def _deferred_errors_of(self, owner: str, stage: str) -> Iterator[None]:
        try:
            with _errors_of(owner, f"failed to record the stage {stage}"):
                yield
        except TrackerError as error:
            self._deferred = self._deferred or error

    def _raise_deferred(self) -> None:
        error, self._deferred = self._deferred, None
        if error is not None:
            raise error

    def finish(self, *, failed: bool, files: Sequence[Path]) -> None:
        """Pass the end of the run to all trackers and close them, then raise `TrackerError` for one that failed."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._raise_deferred)
            stack.callback(self.close)
            for name, tracker in self._open.items():
                stack.enter_context(_errors_of(name, "failed to record the end of the run"))
                stack.callback(tracker.run_finished, failed=failed, files=files)

    def close(self) -> None:
        """Close all trackers, then raise `TrackerError` for one that failed. Idempotent."""
        with contextlib.ExitStack() as stack:
            while self._open:
                name, tracker = self._open.popitem()
                stack.enter_context(_errors_of(name, "failed to close"))
                stack.callback(tracker.close)


@contextlib.contextmanager
def _errors_of(name: str, what: str) -> Iterator[None]:
    """Convert an exception of a tracker to `TrackerError`."""
    try:
        yield
    except TrackerError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise TrackerError(f"{name} {what}: {cause}") from error
