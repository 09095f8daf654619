"""Contents of the report besides curves and samples: headline numbers and tables."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.ledger import OTHER
from roll_tools.charts import figure, seconds, stacked_steps
from roll_tools.checkpoint_listing import size_text
from roll_tools.curves import points
from roll_tools.saved_record import StageTime

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from roll_core.runtime.records.run_dir import RunDir
    from roll_tools.saved_record import SavedRecord

_COLOURS = 14
_SCORES = (
    ("held-out score", "val/score/mean", False),
    ("held-out loss", "val/loss", False),
    ("held-out token accuracy", "val/token_accuracy", False),
    ("held-out reward accuracy", "val/rewards/accuracies", False),
    ("reward", "score/mean", True),
    ("loss", "train/loss", True),
)
"""Label and metric of the first tiles, and whether to average steps because single values are too noisy."""
_AVERAGED_STEPS = 10


def date(unix_time: float) -> str:
    """Format Unix seconds as local date and time."""
    return f"{datetime.fromtimestamp(unix_time):%Y-%m-%d %H:%M:%S}"


def facts_of(record: SavedRecord) -> Iterator[tuple[str, str]]:
    """Yield label and value of the facts below the title: pipeline, platform, start, duration, resumed checkpoint."""
    for name in ("pipeline", "platform", "executor", "seed"):
        if (value := getattr(record, name)) not in ("", None):
            yield name, str(value)
    if record.started is not None:
        yield "started", date(record.started)
        if record.ended is not None:
            yield "took", seconds(record.ended - record.started)
    if record.resumed_from:
        yield "resumed from", f"{record.resumed_from} (step {record.resumed_step})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One headline number with its label."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


def tiles_of(record: SavedRecord, metrics: Sequence[Mapping[str, float]]) -> list[Tile]:
    """Headline tiles: scores, steps, wall time, tokens trained, guards tripped."""
    scores = (_score_tile(label, points(metrics, name), noisy) for label, name, noisy in _SCORES)
    tiles = [tile for tile in scores if tile is not None][:3]
    steps = max((int(row["step"]) for row in metrics), default=record.steps_done)
    tiles.append(Tile(label="steps", value=f"{steps}" + (f" / {record.steps_asked}" if record.steps_asked else "")))
    if record.started is not None and record.ended is not None:
        # The ledger begins with the process, before the record.
        wall = sum(row.seconds for row in record.time or ()) or record.ended - record.started
        tiles.append(Tile(label="wall time", value=seconds(wall)))
    trained = sum(row.get("tokens/trained", 0.0) for row in metrics)
    if trained:
        spent = sum(row.get("time/step", 0.0) for row in metrics if "tokens/trained" in row)
        rate = f"{figure(trained / spent)} per second" if spent else ""
        tiles.append(Tile(label="tokens trained", value=figure(trained), note=rate))
    if record.started is not None:
        tripped = sum(record.guards.counts.values())
        fatal = any(event.action == "error" for event in record.guards.events)
        tone = "bad" if fatal else "warn" if tripped else "good"
        note = ", ".join(record.guards.counts)
        tiles.append(Tile(label="guards tripped", value=str(tripped or "none"), note=note, tone=tone))
    return tiles


def _score_tile(label: str, points: Sequence[tuple[float, float]], noisy: bool) -> Tile | None:
    values = [y for _, y in points if math.isfinite(y)]
    if not values:
        return None
    if not noisy or len(values) < 3 * _AVERAGED_STEPS:
        return Tile(label=label, value=figure(values[-1]), note=f"from {figure(values[0])}" if len(values) > 1 else "")
    first, last = (sum(part) / len(part) for part in (values[:_AVERAGED_STEPS], values[-_AVERAGED_STEPS:]))
    return Tile(label=label, value=figure(last), note=f"from {figure(first)}; means of {_AVERAGED_STEPS} steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTable:
    """Time of a run by stage, and a chart of the time of each step."""

    rows: list[StageTime]
    total: float
    colours: dict[str, int]
    """Number of the colour, by stage."""
    steps_svg: str
    is_partial: bool
    """True if the rows are the sum of the recorded steps, because the run has not written its ledger."""


def time_table(record: SavedRecord, metrics: Sequence[Mapping[str, float]]) -> TimeTable | None:
    """Build the time section; None if neither the record nor the metrics contain times."""
    steps = [
        (
            int(row["step"]),
            {n[5:]: v for n, v in row.items() if n.startswith("time/") and n != "time/step" and 0 < v < math.inf},
        )
        for row in metrics
        if "time/step" in row
    ]
    rows = record.time or _summed([parts for _, parts in steps])
    if not rows:
        return None
    names = [row.stage for row in rows] + sorted({name for _, parts in steps for name in parts})
    ordered = [name for name in dict.fromkeys(names) if name != OTHER]
    colours = {name: index % (_COLOURS - 1) for index, name in enumerate(ordered)} | {OTHER: _COLOURS - 1}
    return TimeTable(
        rows=rows,
        total=sum(row.seconds for row in rows),
        colours=colours,
        steps_svg=stacked_steps([step for step in steps if step[0] > 0], colours),
        is_partial=not record.time,
    )


def _summed(steps: Sequence[Mapping[str, float]]) -> list[StageTime]:
    """Sum the times of all steps by stage, longest first and `other` last."""
    total: defaultdict[str, float] = defaultdict(float)
    entries: Counter[str] = Counter()
    for parts in steps:
        for name, value in parts.items():
            if math.isfinite(value):
                total[name] += value
                entries[name] += 1
    order = sorted(total, key=lambda name: (name == OTHER, -total[name]))
    return [StageTime(stage=name, seconds=total[name], entries=entries[name]) for name in order]


KEPT_BYTES = 64 << 20
"""Freed memory that the C library may keep, which the measurement of a process includes."""


def memory_rows(processes: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Predicted and measured memory of each process, on host and device."""
    rows = []
    for row in processes:
        for where, measured, predicted in (
            ("host", row["measured_bytes"], row["predicted_bytes"]),
            ("device", row["device_measured_bytes"], row["device_predicted_bytes"]),
        ):
            if measured is None:
                continue
            rows.append(
                {
                    "roles": ", ".join(row["roles"]),
                    "process": f"{row['pid']} on {row['host']}",
                    "where": where,
                    "predicted": "unknown" if predicted is None else f"{predicted / 2**20:,.0f} MiB",
                    "measured": f"{measured / 2**20:,.0f} MiB",
                    "error": "" if predicted is None or not measured else _error(predicted, measured, where),
                }
            )
    return rows


def _error(predicted: int, measured: int, where: str) -> str:
    """Relative error of a prediction; on the host only a bound if it is within what the C library keeps."""
    if where == "host" and abs(predicted - measured) <= KEPT_BYTES:
        return f"within {KEPT_BYTES >> 20} MiB"
    return f"{predicted / measured - 1:+.0%}"


def weight_sync_rows(metrics: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """Count, last value and range of each `weight_sync/` metric over the run."""
    rows = []
    for name in sorted({name for row in metrics for name in row if name.startswith("weight_sync/")}):
        values = [row[name] for row in metrics if name in row]
        finite = [value for value in values if math.isfinite(value)]
        rows.append(
            {
                "name": name.partition("/")[2],
                "count": str(len(values)),
                "last": figure(values[-1]),
                "low": figure(min(finite)) if finite else "",
                "high": figure(max(finite)) if finite else "",
            }
        )
    return rows


def checkpoint_rows(run_dir: RunDir, record: SavedRecord) -> list[dict[str, str]]:
    """Step, path, size, file count, date and rank of each complete checkpoint."""
    best = record.best_checkpoint
    rows = []
    for checkpoint in CheckpointDirectory(run_dir.checkpoints).list():
        files = [path for path in checkpoint.path.rglob("*") if path.is_file()]
        rows.append(
            {
                "step": str(checkpoint.step),
                "path": str(checkpoint.path.relative_to(run_dir.path)),
                "size": size_text(sum(path.stat().st_size for path in files)),
                "files": str(len(files)),
                "written": date(checkpoint.path.stat().st_mtime),
                "best": best.metric if best is not None and best.path == str(checkpoint.path) else "",
            }
        )
    return rows


def environment_rows(record: SavedRecord) -> Iterator[tuple[str, str]]:
    """Yield label and value of host, git state, the roles' Python environments, and the command."""
    for name in ("name", "system", "cpu", "cores", "executable"):
        if record.host.get(name):
            yield {"name": "host"}.get(name, name), str(record.host[name])
    if isinstance(memory := record.host.get("memory_bytes"), int):
        yield "memory", size_text(memory)
    if record.git:
        changes = " with uncommitted changes" if record.git.get("dirty") else ""
        yield "git", f"{str(record.git.get('commit'))[:12]} on {record.git.get('branch')}{changes}"
    for role, versions in record.environments.items():
        yield f"Python of {role}", ", ".join(f"{name} {version}" for name, version in versions.items())
    if record.argv:
        yield "command", " ".join(record.argv)
    if record.cwd:
        yield "directory", record.cwd
