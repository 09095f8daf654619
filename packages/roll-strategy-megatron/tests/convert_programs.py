"""What ranks write for `checkpoint convert`: imported by the ranks."""

from __future__ import annotations

from pathlib import Path

from roll_testing.bench import Case, built, take_step


def write_and_export(rank, case: Case, steps, folder, out):
    """The portable state after some steps, and the directory that the strategy itself makes."""
    with built(case, rank) as strategy:
        for step in steps:
            take_step(strategy, step)
        strategy.save_portable(Path(folder))
        strategy.export_model(Path(out))
