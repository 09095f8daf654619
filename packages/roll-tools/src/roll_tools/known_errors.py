"""Known errors of torch, its libraries and the machine, read from `known_errors.yaml`."""

from __future__ import annotations

from pathlib import Path

import yaml

from roll_core.spec.diagnostics import KnownError

KNOWN_ERRORS: tuple[KnownError, ...] = tuple(
    KnownError(**{**row, "during": tuple(row.get("during", ()))})
    for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
)
