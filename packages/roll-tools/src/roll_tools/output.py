"""Terminal output of `roll-core doctor`, `audit` and `plan`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WIDTH = 140
"""Width of the output, in columns, if stdout is not a terminal."""
MARKS = {"ok": ("✓", "green"), "note": ("·", "dim"), "warning": ("!", "yellow"), "error": ("✗", "bold red")}


def open_console() -> Console:
    """Console for stdout."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)


def findings_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Table of findings. A row has the level, the subject, the value found, the remedy, and further cells."""
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    for title in ("", *titles):
        table.add_column(title, overflow="fold")
    for level, subject, value, remedy, *others in rows:
        mark, style = MARKS[level]
        cell = Text(value)
        if remedy:
            cell.append(f"\n→ {remedy}", style="italic")
        table.add_row(Text(mark, style=style), Text(subject), cell, *(Text(text, style="dim") for text in others))
    return table


def counted(levels: Sequence[str]) -> Text:
    """Number of errors and warnings: `1 error, no warnings`."""
    counts = ((levels.count(level), level) for level in ("error", "warning"))
    return Text("\n" + ", ".join(f"{num or 'no'} {level}{'' if num == 1 else 's'}" for num, level in counts))
