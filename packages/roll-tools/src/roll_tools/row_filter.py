"""`roll-core filter`: writes the rows of an evaluation with their pass rates."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from roll_core.data.rows import read_rows
from roll_core.errors import DataError
from roll_tools.evaluation import responses_of

if TYPE_CHECKING:
    from pathlib import Path

    from roll_core.runtime.records.run_dir import RunDir

COLUMN = "pass_rate"
"""Column of the written rows, and default of `prompt_sampler_options.column`."""


def write_filtered(config: Any, run: RunDir, path: Path, window: tuple[float, float] | None) -> str:
    """Write the rows whose pass rate is between the bounds of `window`, or all rows. Returns a summary.

    Rows have the columns of their file, without those that `data_args.columns` computes. Raises `DataError` if no row
    is in the window, or the file's format cannot have a value.
    """
    data = config.validation.data_args
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for response in responses_of(run):
        if response.score is not None:
            scores[response.prompt].append(response.score)
    inside: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    stored = read_rows(data.model_copy(update={"columns": {}, "id": ""}))
    rows = read_rows(data)
    for row, original in zip(rows, stored, strict=True):
        rate = statistics.fmean(scores[row.id]) if row.id in scores else None
        if window is not None and (rate is None or not window[0] < rate < window[1]):
            dropped["none" if rate is None else "low" if rate <= window[0] else "high"] += 1
            continue
        inside.append({**original.values, COLUMN: rate})
    low, high = window or (0.0, 1.0)
    summary = (
        f"{len(inside)} of {len(rows)} rows; dropped {dropped['low']} with a pass rate of at most {low:g},"
        f" {dropped['high']} of at least {high:g}, {dropped['none']} without a scored response"
    )
    if not inside:
        raise DataError(f"no row is in the window, {path} was not written: {summary}. Scores are in {run.path}")
    _write(path, inside)
    return f"{path}: {summary}"


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    working = path.with_name(f".{path.name}")
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), working)
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}: {str(error).splitlines()[0]}; write a .jsonl file") from error
    else:
        with working.open("w", encoding="utf-8") as file:
            for number, row in enumerate(rows, start=1):
                try:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                except TypeError as error:
                    raise DataError(f"{path} row {number}: {error}; write a .parquet file") from error
    working.replace(path)
