"""`roll-core doctor [CONFIG]`: checks this machine, its software and a config, and suggests remedies."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from roll_core.config import load
from roll_tools.examination import examine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from roll_core.plugins.registry import Registry
    from roll_tools.examination import DoctorFinding

WIDTH = 140
"""Width of the output, in columns, if stdout is not a terminal."""
MARKS = {"ok": ("✓", "green"), "note": ("·", "dim"), "warning": ("!", "yellow"), "error": ("✗", "bold red")}


def show_findings(config: Path | None, overrides: Sequence[str], registry: Registry, *, as_json: bool) -> int:
    """Print every finding. Returns the exit code: 1 if a finding is an error, otherwise 0.

    Raises `ConfigError` (exit code 2) if the config is invalid.
    """
    loaded = load(config, overrides, registry).config if config is not None else None
    findings = list(examine(registry, loaded))
    failed = any(each.result.level == "error" for each in findings)
    if as_json:
        sys.stdout.write(json.dumps(_plain(findings, ok=not failed), indent=2) + "\n")
    else:
        _show(findings)
    return 1 if failed else 0


def _plain(findings: Sequence[DoctorFinding], *, ok: bool) -> dict[str, object]:
    rows = [{"check": each.check, "package": each.package, **asdict(each.result)} for each in findings]
    return {"ok": ok, "findings": rows}


def _show(findings: Sequence[DoctorFinding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # output of drivers and tools may not be encodable here
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    for title in ("", "check", "found", "wanted"):
        table.add_column(title, overflow="fold", no_wrap=False)
    for each in findings:
        mark, style = MARKS[each.result.level]
        found = Text(each.result.found)
        if each.result.remedy:
            found.append(f"\n→ {each.result.remedy}", style="italic")
        table.add_row(Text(mark, style=style), Text(each.title), found, Text(each.result.wanted, style="dim"))
    console.print(table)
    counts = {level: sum(each.result.level == level for each in findings) for level in MARKS}
    console.print(Text(f"\n{_counted(counts['error'], 'error')}, {_counted(counts['warning'], 'warning')}"))


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
