"""Head of the report: outcome, facts and headline numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.runtime.records.jsonlines import finite_number
from roll_core.runtime.records.record import is_abandoned
from roll_core.runtime.records.report.charts import figure, seconds
from roll_core.runtime.records.report.curves import points
from roll_core.runtime.records.report.reading import as_counts, as_dicts, date

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One headline number with its label."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


def outcome_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """Outcome of the run and the tone of its badge (`good`, `bad`, `live`, `warn`)."""
    outcome = str(record.get("outcome") or "unknown")
    if is_abandoned(record):
        return "killed", "bad"
    return outcome, {"finished": "good", "failed": "bad", "running": "live"}.get(outcome, "warn")


def facts_of(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and value of the run's facts: pipeline, platform, start, duration, resumed checkpoint."""
    facts = [(label, str(record[key])) for label, key in _FACTS if record.get(key) not in (None, "")]
    started, ended = finite_number(record.get("started")), finite_number(record.get("ended"))
    if started is not None:
        facts.append(("started", date(started)))
        if ended is not None:
            facts.append(("took", seconds(ended - started)))
    if record.get("resumed_from"):
        facts.append(("resumed from", f"{record['resumed_from']} (step {record.get('resumed_step')})"))
    return facts


_FACTS = (("pipeline", "pipeline"), ("platform", "platform"), ("executor", "executor"), ("seed", "seed"))


def tiles_of(
    record: Mapping[str, Any], metrics: Sequence[Mapping[str, float]], guards: Mapping[str, Any]
) -> list[Tile]:
    """Headline tiles: scores, steps, wall time, tokens trained, guards tripped."""
    tiles = [
        tile for label, name, noisy in _SCORES if (tile := _score_tile(label, points(metrics, name), noisy)) is not None
    ][:3]
    steps = max((int(row["step"]) for row in metrics), default=int(finite_number(record.get("steps_done")) or 0))
    asked = finite_number(record.get("steps_asked"))
    tiles.append(Tile(label="steps", value=f"{steps}" + (f" / {asked:.0f}" if asked else "")))
    started, ended = finite_number(record.get("started")), finite_number(record.get("ended"))
    if started is not None and ended is not None:
        tiles.append(Tile(label="wall time", value=seconds(sum(_ledger_seconds(record)) or ended - started)))
    trained = sum(row.get("tokens/trained", 0.0) for row in metrics)
    if trained:
        spent = sum(row.get("time/step", 0.0) for row in metrics if "tokens/trained" in row)
        rate = f"{figure(trained / spent)} per second" if spent else ""
        tiles.append(Tile(label="tokens trained", value=figure(trained), note=rate))
    counts = as_counts(guards.get("counts"))
    if record:
        tripped = sum(count for _, count in counts)
        fatal = any(event.get("action") == "error" for event in as_dicts(guards.get("events")))
        value = str(tripped) if tripped else "none"
        note = ", ".join(name for name, _ in counts)
        tiles.append(
            Tile(label="guards tripped", value=value, note=note, tone="bad" if fatal else "warn" if tripped else "good")
        )
    return tiles


_SCORES = (
    ("held-out score", "val/score/mean", False),
    ("held-out loss", "val/loss", False),
    ("held-out token accuracy", "val/token_accuracy", False),
    ("reward", "score/mean", True),
    ("loss", "train/loss", True),
)
"""Label and metric of the first tiles, and whether to average steps because single values are too noisy."""


_QUOTED_STEPS = 10


def _ledger_seconds(record: Mapping[str, Any]) -> list[float]:
    """Seconds of each ledger row. The ledger begins with the process, before the record."""
    return [s for row in as_dicts(record.get("time")) if (s := finite_number(row.get("seconds"))) is not None]


def _score_tile(label: str, points: Sequence[tuple[float, float]], noisy: bool) -> Tile | None:
    values = [y for _, y in points if math.isfinite(y)]
    if not values:
        return None
    if not noisy or len(values) < 3 * _QUOTED_STEPS:
        return Tile(label=label, value=figure(values[-1]), note=f"from {figure(values[0])}" if len(values) > 1 else "")
    first, last = (sum(part) / len(part) for part in (values[:_QUOTED_STEPS], values[-_QUOTED_STEPS:]))
    return Tile(label=label, value=figure(last), note=f"from {figure(first)}; means of {_QUOTED_STEPS} steps")
