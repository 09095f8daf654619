"""Tracker `csv`: `metrics.csv` in the run directory, one row per step, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import json
import os
from typing import TYPE_CHECKING, Any

from roll_core.spec.pipeline import Tracker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path


class CsvTracker(Tracker):
    """Columns are the metrics in order of appearance. A new metric rewrites the file with one more column.

    Rows are in the file only: memory does not grow with the number of steps.
    """

    def __init__(self, run_dir: Path, run_name: str, options: Mapping[str, Any]) -> None:
        """Start with the steps that `metrics.jsonl` of a resumed run has."""
        self._path = run_dir / "metrics.csv"
        self._columns: dict[str, None] = {"step": None}
        self._last_step: int | None = None
        history = run_dir / "metrics.jsonl"
        for row in _history(history):
            self._columns.update(dict.fromkeys(row))
            self._last_step = row["step"]
        self._write(_history(history))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row. Rewrite the file if it needs another column, or has the step already."""
        row = {"step": step, **metrics}
        repeated, self._last_step = step == self._last_step, step
        if metrics.keys() <= self._columns.keys() and not repeated:
            with self._path.open("a", newline="", encoding="utf-8") as stream:
                csv.DictWriter(stream, self._columns).writerow(row)
            return
        self._columns.update(dict.fromkeys(row))
        with self._path.open(newline="", encoding="utf-8") as stream:
            self._write(_joined(csv.DictReader(stream), row))

    def close(self) -> None:
        """Nothing is left to write."""

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace the file. `rows` may be read from it."""
        new = self._path.with_name(f".{self._path.name}.new")
        with new.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(new, self._path)


def _history(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            row = json.loads(line)
            yield {name: value for name, value in row.items() if name != "time"}


def _joined(rows: Iterable[Mapping[str, Any]], new: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """`rows`, with `new` merged into the row of its step, or after all rows."""
    is_merged = False
    for row in rows:
        same = row["step"] == str(new["step"])
        is_merged |= same
        yield {**row, **new} if same else row
    if not is_merged:
        yield new
