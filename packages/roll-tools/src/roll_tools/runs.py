"""`roll-core runs` lists runs from their files; `roll-core watch` follows one from another shell.

Both only read, and accept run directories in any state.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.errors import RunDirectoryError
from roll_core.runtime.records.console import Console
from roll_core.runtime.records.run_files import number, safe
from roll_tools.open_run import aligned, open_run, runs_below
from roll_tools.saved_record import SavedRecord, config_hash, read_state, readable_metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.runtime.records.run_dir import RunDir

SCORES = ("val/score/mean", "val/loss", "score/mean", "reward/mean", "train/loss", "loss")
"""Metrics of the column `score`; the first that the run has."""
_POLL_S = 0.5
_RECORD_TIMEOUT_S = 10.0
"""Seconds that `watch` waits for a readable run.json before it ends."""
_HISTORY = 20
"""Number of past steps that `watch` shows before it follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run of the listing."""

    run: str
    """Path of the run directory."""
    state: str
    """Outcome in the record; `killed` if the process no longer exists, `unknown` without a readable record."""
    pipeline: str
    step: int
    steps_asked: int | None
    metric: str
    """Name of `score`: the first of `SCORES` that was recorded; empty if none was."""
    score: float | None
    """Newest value of the metric."""
    config: str
    """First 8 hexadecimal digits of the config's hash. Ignores `output_dir`, `exp_name` and `resume_from_checkpoint`,
    so that a resumed run has the hash of the run that it continues."""
    started: float | None
    """Unix time in seconds."""
    ended: float | None


def list_runs(place: Path, *, as_json: bool) -> int:
    """Print the runs of a directory of experiments, an experiment or a run. Returns the exit code 0.

    Raises `RunDirectoryError` if `place` is not a directory.
    """
    rows = [_row(run) for run in runs_below(place)]
    if as_json:
        sys.stdout.write(json.dumps(safe([asdict(row) for row in rows]), indent=2) + "\n")
    elif rows:
        sys.stdout.write(_table(rows))
    else:
        sys.stdout.write(f"no run in {place}\n")
    return 0


def watch(place: Path) -> int:
    """Follow a run until it ends. Returns 0 if it finished or Ctrl-C ended the command, otherwise 1."""
    run = open_run(place)
    console = Console(must_be_read=True)
    try:
        return _follow(run, console)
    except KeyboardInterrupt:
        console.close()
        console.line(f"stopped watching {run.name}")
        return 0
    finally:
        console.close()


class MetricsFollower:
    """Reads the new complete lines of a growing `metrics.jsonl`. A replaced file is read again."""

    def __init__(self, path: Path) -> None:
        self._path, self._identity, self._offset, self._step = path, (0, 0), 0, -1

    def new_rows(self) -> list[dict[str, float]]:
        """Rows of steps that no earlier call returned, in order; empty if there are none or the file is missing."""
        try:
            with self._path.open("rb") as stream:
                stat = self._path.stat()
                if (stat.st_dev, stat.st_ino) != self._identity or stat.st_size < self._offset:
                    self._identity, self._offset = (stat.st_dev, stat.st_ino), 0
                stream.seek(self._offset)
                complete, newline, _ = stream.read().rpartition(b"\n")
        except OSError:
            return []
        self._offset += len(complete) + len(newline)
        rows = []
        for line in complete.splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(row, dict) or not isinstance(step := row.get("step"), int) or step <= self._step:
                continue
            self._step = step
            rows.append({name: value for name, raw in row.items() if (value := number(raw)) is not None})
        return rows


def _follow(run: RunDir, console: Console) -> int:
    rows_of = MetricsFollower(run.metrics)
    record, outcome = read_state(run)
    opened = time.monotonic()
    shown = False
    while True:
        over = outcome not in ("running", "unknown")  # before the file is read, so that no last line is missed
        rows = rows_of.new_rows()
        if not shown and (record.steps_asked or rows or over):
            shown = True
            console.line(f"roll · {record.name or run.name} · {record.pipeline or 'unknown pipeline'}", style="bold")
            past = {name: value for row in rows for name, value in row.items()}
            rows = rows[-_HISTORY:]
            console.start(
                total_steps=record.steps_asked or record.steps_done,
                elapsed_s=_elapsed(record),
                metrics=past,
            )
        now, clock = time.monotonic(), time.time()
        for row in rows:
            step, ended_at = int(row["step"]), now - max(0.0, clock - row.get("time", clock))
            if held_out := {name: value for name, value in row.items() if name.startswith("val/")}:
                console.evaluated(step, held_out)
            if step:
                console.step(step, row, ended_at=ended_at)
        if over:
            break
        if outcome == "unknown" and time.monotonic() - opened > _RECORD_TIMEOUT_S:
            raise RunDirectoryError(
                f"{run.record} is missing or cannot be read, so the end of the run cannot be detected; expected the"
                " record that a run writes when it starts"
            )
        time.sleep(_POLL_S)
        record, outcome = read_state(run)
    error = f"{record.error.type}: {record.error.message}" if record.error else ""
    advice = record.error.advice if record.error else ""
    lines = [("run", str(run.path)), *([("report", str(run.report))] if run.report.is_file() else [])]
    console.finish(outcome=outcome, error=error, advice=advice, lines=lines)
    return 0 if outcome == "finished" else 1


def _elapsed(record: SavedRecord) -> float:
    return 0.0 if record.started is None else max(0.0, (record.ended or time.time()) - record.started)


def _row(run: RunDir) -> RunRow:
    record, state = read_state(run)
    metrics = readable_metrics(run)
    metric = next((name for name in SCORES if any(name in row for row in metrics)), "")
    return RunRow(
        run=str(run.path),
        state=state,
        pipeline=record.pipeline,
        step=max([record.steps_done, *(int(row["step"]) for row in metrics[-1:])]),
        steps_asked=record.steps_asked,
        metric=metric,
        score=next((row[metric] for row in reversed(metrics) if metric in row), None) if metric else None,
        config=config_hash(run.config),
        started=record.started,
        ended=record.ended,
    )


def _table(rows: Sequence[RunRow]) -> str:
    cells = [["run", "state", "step", "score", "metric", "config", "age"]]
    cells += [
        [
            _relative(row.run),
            row.state,
            f"{row.step}/{row.steps_asked}" if row.steps_asked else str(row.step),
            "" if row.score is None else f"{row.score:.4g}",
            row.metric,
            row.config,
            "" if row.started is None else _age(time.time() - row.started),
        ]
        for row in rows
    ]
    return aligned(cells)


def _relative(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
