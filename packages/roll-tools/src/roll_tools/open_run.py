"""The run directories that arguments of the commands name, and tables of their lists.

A light module: `checkpoint list` imports neither pydantic nor rich.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.errors import RunDirectoryError, closest
from roll_core.runtime.records.run_dir import RunDir, experiment_runs

if TYPE_CHECKING:
    from collections.abc import Sequence


def open_run(path: str | Path) -> RunDir:
    """The run at `path`, which is a run directory or the directory of an experiment (its newest run).

    Raises `RunDirectoryError` if `path` is neither.
    """
    place = Path(os.path.expanduser(path)).absolute()
    if not place.is_dir():
        close = closest(place.name, [sibling.name for sibling in place.parent.glob("*")])
        raise RunDirectoryError(
            f"{place} is not a directory: "
            + (f"did you mean {close}?" if close else "give a run directory, such as output/grpo/latest")
        )
    if is_run(place):
        return RunDir(place.resolve())
    if runs := experiment_runs(place):
        return runs[-1]
    raise RunDirectoryError(
        f"{place} is not a run directory (run.json, config.yaml or metrics.jsonl) and contains none: give one, such as"
        " output/grpo/latest"
    )


def runs_below(place: str | Path) -> list[RunDir]:
    """The run at `place`, or the runs of an experiment or of a directory of experiments, oldest first per experiment.

    Raises `RunDirectoryError` if `place` is not a directory.
    """
    path = Path(os.path.expanduser(place)).absolute()
    if not path.is_dir():
        raise RunDirectoryError(f"{path} is not a directory: give the output_dir of runs, an experiment or a run")
    if is_run(path):
        return [RunDir(path.resolve())]
    if runs := experiment_runs(path):
        return runs
    return [run for experiment in sorted(path.iterdir()) for run in experiment_runs(experiment)]


def is_run(path: Path) -> bool:
    """True if `path` has a file of a run directory."""
    return any((path / name).exists() for name in ("run.json", "config.yaml", "metrics.jsonl"))


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Lines of a table with its columns aligned. The first of `cells` are the titles."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "".join(f"{row.rstrip()}\n" for row in rows)
