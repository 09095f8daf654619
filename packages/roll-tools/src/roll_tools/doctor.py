"""`roll-core doctor [CONFIG]`: checks this machine, its software and a config, and suggests remedies."""

from __future__ import annotations

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


def show_findings(config: Path | None, overrides: Sequence[str], registry: Registry, *, as_json: bool) -> int:
    """Print every finding. Returns the exit code: 1 if a finding is an error, otherwise 0.

    Raises `ConfigError` (exit code 2) if the config is invalid.
    """
    loaded = load(config, overrides, registry).config if config is not None else None
    findings = list(examine(registry, loaded))
    failed = any(finding.result.level == "error" for finding in findings)
    if as_json:
        sys.stdout.write(json.dumps(_plain(findings, ok=not failed), indent=2) + "\n")
    else:
        _show(findings)
    return 1 if failed else 0


def _plain(findings: Sequence[DoctorFinding], *, ok: bool) -> dict[str, object]:
    rows = [{"check": finding.check, "package": finding.package, **asdict(finding.result)} for finding in findings]
    return {"ok": ok, "findings": rows}


def _show(findings: Sequence[DoctorFinding]) -> None:
    from roll_tools.output import counted, findings_table, open_console

    console = open_console()
    rows = [
        (finding.result.level, finding.title, finding.result.found, finding.result.remedy, finding.result.wanted)
        for finding in findings
    ]
    console.print(findings_table(("check", "found", "wanted"), rows))
    console.print(counted([finding.result.level for finding in findings]))
