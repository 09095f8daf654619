"""`roll-core report RUN`: rewrites the report of a run, which may be in progress or have crashed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from pathlib import Path


def write_report(run: Path) -> int:
    """Write `report.html` of a run directory, or of an experiment's newest run, and print its path.

    Returns the exit code. Raises `RunDirectoryError` if there is no run.
    """
    from roll_core.runtime.records.report import write_report as write
    from roll_core.runtime.records.run_dir import RunDir

    report = write(RunDir.open(run).path)
    Console(soft_wrap=True, highlight=False).print(Text(str(report)))
    return 0
