"""What ranks write for `checkpoint convert`: imported by the ranks."""

from __future__ import annotations

from pathlib import Path

from roll_modeling.portable_files import write_portable_state
from roll_testing.bench import Case, built, take_step


def write_and_export(rank, case: Case, steps, folder, out):
    """The portable state after some steps, and the directory that the strategy itself makes."""
    with built(case, rank) as strategy:
        for step in steps:
            take_step(strategy, step)
        write_portable_state(strategy.export_state(), case.model, Path(folder), leads=rank == 0)
        strategy.export_model(Path(out))
