"""`roll-core audit DATA|CONFIG`: checks rows, tokenizer and chat template, and shows which tokens are trained."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.cli.doctor import MARKS, WIDTH
from roll_core.config import load
from roll_core.config.overrides import parse_settings
from roll_core.data.rows import ENDINGS
from roll_core.errors import UnsupportedError
from roll_core.plugins.registry import load_registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.data.audit import AuditFinding, MaskedRow
    from roll_core.spec.config import RunConfig


def audit(
    source: Path,
    overrides: Sequence[str],
    disabled_plugins: Sequence[str],
    *,
    tokenizer: str | None = None,
    num_shown: int = 2,
    as_json: bool = False,
) -> int:
    """Print every finding, and the masks of the first rows. Returns 1 if a finding is an error, otherwise 0.

    `source` is a config, or a file of rows: then `overrides` are keys of `data_args`, `prompt_length` and
    `response_length`, and `tokenizer` is a model's directory or hub id (default: bytes). Raises `RollError`.
    """
    registry = load_registry(disabled_plugins)
    is_data = source.suffix.lower() in ENDINGS or source.suffix.lower() == ".tsv"
    with tempfile.TemporaryDirectory() as folder:
        from roll_core.runtime.run.active_run import DatasetCache
        from roll_core.runtime.run.audit import audit_data, audit_run, shown_rows
        from roll_core.runtime.run.tokenizer import prepare_tokenizer

        data = DatasetCache()
        if is_data:
            values = {key.removeprefix("data_args."): value for key, value in parse_settings(overrides).items()}
            findings, rows = audit_data(source, values, tokenizer, Path(folder), num_shown)
        else:
            loaded = load(source, overrides, registry)
            config: RunConfig = loaded.config
            if not loaded.pipeline.tokenizer:
                raise UnsupportedError(f"pipeline {config.pipeline} has no tokenizer and no chat template to audit")
            built = prepare_tokenizer(config, data, Path(folder))
            findings = list(audit_run(config, data.rows, built))
            rows = list(shown_rows(config, data.rows, built, num_shown))
    failed = any(each.level == "error" for each in findings)
    if as_json:
        shown = [asdict(each) for each in rows]
        found = {"ok": not failed, "findings": [asdict(each) for each in findings], "rows": shown}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        _show(findings, rows)
    return 1 if failed else 0


def _show(findings: Sequence[AuditFinding], rows: Sequence[MaskedRow]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    colours = sys.stdout.isatty()
    console = Console(width=None if colours else WIDTH, highlight=False)
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    for title in ("", "check", "found"):
        table.add_column(title, overflow="fold")
    for each in findings:
        mark, style = MARKS[each.level]
        found = Text(each.found)
        if each.remedy:
            found.append(f"\n→ {each.remedy}", style="italic")
        table.add_row(Text(mark, style=style), Text(f"{each.check} {each.subject}"), found)
    console.print(table)
    if rows:
        console.print(Text("\nread by the model, ", style="dim").append("⟦trained⟧", style="bold green"))
    for row in rows:
        line = Text(f"{row.where}\n", style="dim")
        for text, trained in row.pieces:
            line.append(f"⟦{text}⟧" if trained else text, style="bold green" if trained else "default")
        console.print(line)
    counts = {level: sum(each.level == level for each in findings) for level in ("error", "warning")}
    words = (f"{num or 'no'} {level}{'s' * (num != 1)}" for level, num in counts.items())
    console.print(Text(f"\n{', '.join(words)}"))
