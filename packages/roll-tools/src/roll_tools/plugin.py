"""Hooks that provide the commands and write the report of a run. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import CommandProvider

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROLL_HOOK_API = 1


@hookimpl
def roll_commands() -> Iterator[CommandProvider]:
    """Commands that read the files of runs, and the one that plays environments."""
    for name, summary in (
        ("envs", "List environments, or play an episode of one in the terminal"),
        ("runs", "List runs with state, step, score, config hash and age"),
        ("watch", "Follow a run in the terminal until it ends"),
        ("report", "Write report.html of a run again, or a page that compares several runs"),
    ):
        yield CommandProvider(name=name, target=f"roll_tools.commands:{name}", summary=summary)


@hookimpl
def roll_run_recorded(directory: Path) -> Path:
    """Write `report.html`."""
    from roll_tools.page import write_report

    return write_report(directory)
