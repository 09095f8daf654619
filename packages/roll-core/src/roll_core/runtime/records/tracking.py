"""Metrics of a run: `metrics.jsonl` always, and the trackers in `track_with`.

metrics of step n  ─►  MetricsFile ─► metrics.jsonl    {"step": n, "time": …, "score/mean": …, …}
                   └►  Trackers    ─► tensorboard, …
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Self

from roll_core.errors import TrackerError
from roll_core.runtime.records.jsonlines import LineWriter, copy_lines, number, read_lines, up_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path
    from types import TracebackType

    from roll_core.spec.pipeline import Tracker

logger = logging.getLogger(__name__)

_RESERVED = ("step", "time")
_TIMING = ("time", "tokens_per_s/", "weight_sync/seconds", "engine/")


class MetricsFile:
    """Writes `metrics.jsonl`, one line per step. The line is in the file as soon as `log` returns."""

    def __init__(self, path: Path, *, history: Path | None = None, resumed_step: int = 0) -> None:
        """Open `path`. A resumed run first copies the lines of `history` up to `resumed_step`, one for each step.

        `history` is the metrics file of the run that this one continues, or `path` itself.
        """
        self._path = path
        self._copied: set[int] = set()
        if history is not None:
            copy_lines(history, path, up_to(resumed_step))
            self._copied = {row["step"] for row in read_lines(path)}
            if lost := set(range(1, resumed_step + 1)) - self._copied:
                logger.warning(
                    "%s lacks %d of the %d steps before this run: %s. The curves of this run have the same gap.",
                    history,
                    len(lost),
                    resumed_step,
                    ranges(lost),
                )
        self._writer = LineWriter(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of step `step`, or extend the line that was copied for it from `history`.

        Raises `ValueError` if a metric is named `step` or `time`.
        """
        for name in _RESERVED:
            if name in metrics:
                raise ValueError(f"a metric cannot be called {name!r}: metrics.jsonl has a field of that name")
        if step not in self._copied:
            self._writer.write({"step": step, "time": round(time.time(), 3), **metrics})
            return
        self._writer.close()
        copy_lines(self._path, self._path, lambda row: _joined(row, metrics) if row["step"] == step else row)
        self._writer = LineWriter(self._path)

    def check(self) -> None:
        """Raise `RunFileError` if the file was deleted or replaced."""
        self._writer.check()

    def close(self) -> None:
        """Close the file; may be called more than once."""
        self._writer.close()


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
    found: list[list[int]] = []
    for step in sorted(steps):
        if found and found[-1][-1] == step - 1:
            found[-1] = [found[-1][0], step]
        else:
            found.append([step, step])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in found)


def repeatable(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a run with the same seed reproduces bit for bit.

    Omits durations, and engine metrics, because batching, waiting and caching depend on when requests arrive.
    """
    return {name: value for name, value in metrics.items() if not name.startswith(_TIMING)}


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

    @classmethod
    def opened(cls, factories: Mapping[str, Callable[[], Tracker]]) -> Self:
        """Open trackers by name. If one cannot be opened, closes the earlier ones and raises `TrackerError`."""
        trackers = cls()
        for name, factory in factories.items():
            try:
                trackers._open[name] = factory()
            except Exception as error:
                trackers._close_quietly()
                raise TrackerError(f"tracker {name} could not be opened: {_say(error)}") from error
        return trackers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_quietly()

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the resolved config, without secrets, to all trackers. Raises `TrackerError` at the first failure."""
        for name, tracker in self._open.items():
            try:
                tracker.log_config(config)
            except Exception as error:
                raise TrackerError(f"tracker {name} failed to record the config: {_say(error)}") from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics to all trackers. Raises `TrackerError` with the tracker's name at the first failure."""
        for name, tracker in self._open.items():
            try:
                tracker.log(step, metrics)
            except Exception as error:
                raise TrackerError(f"tracker {name} failed to record step {step}: {_say(error)}") from error

    def close(self) -> None:
        """Close all trackers, then raise `TrackerError` for the first that failed. Idempotent."""
        errors = self._close_all()
        if errors:
            name, error = errors[0]
            raise TrackerError(f"tracker {name} failed to close: {_say(error)}") from error

    def _close_quietly(self) -> None:
        """Close all trackers and only log failures, because another error is being raised."""
        for name, error in self._close_all():
            logger.warning("tracker %s failed to close: %s", name, _say(error))

    def _close_all(self) -> list[tuple[str, Exception]]:
        errors = []
        while self._open:
            name, tracker = self._open.popitem()
            try:
                tracker.close()
            except Exception as error:
                errors.append((name, error))
        return errors


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
