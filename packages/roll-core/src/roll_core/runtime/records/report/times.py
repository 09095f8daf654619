"""Time of a run by stage, in total and per step, for the report."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.runtime.records.jsonlines import finite_number
from roll_core.runtime.records.ledger import OTHER
from roll_core.runtime.records.report.charts import BarSegment, figure, seconds, stacked_bar, stacked_steps
from roll_core.runtime.records.report.reading import as_dicts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_COLOURS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAccount:
    """Time by stage: table rows, a bar over the run, and a chart of the steps."""

    rows: list[dict[str, Any]]
    bar: list[BarSegment]
    steps_svg: str
    total: str
    note: str = ""


def time_account(record: Mapping[str, Any], metrics: Sequence[Mapping[str, float]]) -> TimeAccount | None:
    """Build the time section of the report; None if neither the record nor the metrics contain times."""
    rows, note = _time_rows(record, metrics)
    if not rows:
        return None
    total = sum(row["seconds"] for row in rows)
    steps = [
        (int(row["step"]), {n[5:]: v for n, v in row.items() if n.startswith("time/") and n != "time/step" and v > 0})
        for row in metrics
        if row["step"] > 0 and "time/step" in row
    ]
    names = [row["stage"] for row in rows] + sorted({name for _, parts in steps for name in parts})
    ordered = [name for name in dict.fromkeys(names) if name != OTHER]
    colours = {name: index % (_COLOURS - 1) for index, name in enumerate(ordered)} | {OTHER: _COLOURS - 1}
    in_steps = {name for _, parts in steps for name in parts}
    for row in rows:
        row["colour"] = colours[row["stage"]]
        row["share"] = row["seconds"] / total if total > 0 else 0.0
        row["text"] = seconds(row["seconds"])
        tokens = row.get("tokens") or 0
        row["rate"] = figure(tokens / row["seconds"]) if tokens and row["seconds"] > 0 else ""
    return TimeAccount(
        rows=rows,
        bar=stacked_bar([(row["stage"], row["seconds"]) for row in rows], colours),
        steps_svg=stacked_steps(steps, {name: c for name, c in colours.items() if name in in_steps}),
        total=seconds(total),
        note=note,
    )


def _time_rows(record: Mapping[str, Any], metrics: Sequence[Mapping[str, float]]) -> tuple[list[dict[str, Any]], str]:
    """Rows of the ledger, or for an unfinished run the sum of its steps' times; and a note about the latter."""
    rows = [
        {
            "stage": str(row["stage"]),
            "seconds": s,
            "entries": row.get("entries") or 0,
            "tokens": finite_number(row.get("tokens")) or 0,
        }
        for row in as_dicts(record.get("time"))
        if "stage" in row and (s := finite_number(row.get("seconds"))) is not None
    ]
    if rows:
        return rows, ""
    total: dict[str, float] = defaultdict(float)
    entries: dict[str, int] = defaultdict(int)
    for row in metrics:
        for name, value in row.items():
            if name.startswith("time/") and name != "time/step" and math.isfinite(value):
                total[name[5:]] += value
                entries[name[5:]] += 1
    order = sorted(total, key=lambda name: (name == OTHER, -total[name]))
    return (
        [{"stage": name, "seconds": total[name], "entries": entries[name], "tokens": 0} for name in order],
        "Only what the steps recorded: the run has not written its whole account (yet).",
    )
