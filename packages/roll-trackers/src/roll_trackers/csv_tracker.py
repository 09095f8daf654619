"""Tracker `csv`: `metrics.csv` in the run directory, one row per step, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

from roll_core.spec.pipeline import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class CsvTracker(Tracker):
    """Columns are the metrics in order of appearance. A new metric rewrites the file with one more column."""

    def __init__(self, run_dir: Path, run_name: str, options: Mapping[str, Any]) -> None:
        """Start with the steps that `metrics.jsonl` of a resumed run has."""
        self._path = run_dir / "metrics.csv"
        self._rows: list[dict[str, Any]] = []
        self._columns: list[str] = ["step"]
        history = run_dir / "metrics.jsonl"
        for line in history.read_text(encoding="utf-8").splitlines() if history.is_file() else ():
            row = json.loads(line)
            self._add({name: value for name, value in row.items() if name != "time"})
        self._write()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row, and rewrite the file if it needs another column."""
        known = len(self._columns)
        self._add({"step": step, **metrics})
        if len(self._columns) > known:
            self._write()
            return
        with self._path.open("a", newline="", encoding="utf-8") as stream:
            csv.DictWriter(stream, self._columns).writerow(self._rows[-1])

    def close(self) -> None:
        """Nothing is left to write."""

    def _add(self, row: dict[str, Any]) -> None:
        self._columns += [name for name in row if name not in self._columns]
        self._rows.append(row)

    def _write(self) -> None:
        with self._path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)
