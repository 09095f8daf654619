"""`roll-core run CONFIG... [key=value ...]`: executes one run per config, in order."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from typing import TYPE_CHECKING

from roll_core import openmp
from roll_core.cli.files import FileCheck
from roll_core.config import load
from roll_core.config.secrets import Redactor
from roll_core.errors import RollError
from roll_core.plugins.registry import load_registry
from roll_core.plugins.requirements import check_extra

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


GC_THRESHOLDS = (50_000, 10, 10)
"""Thresholds for `gc.set_threshold`. With Python's 700, collections often scan half a million library objects."""


def run_configs(
    configs: Sequence[Path], overrides: Sequence[str], disabled_plugins: Sequence[str], *, files: bool = True
) -> int:
    """Check every config before the first one runs, then run them in order; the first failure ends the sequence.

    With `files`, the check includes the models, rows and reward code that configs name. Returns the exit code: 0 only
    if every run completed the requested steps.
    """
    os.environ.update(openmp.environment(os.environ))  # OpenMP reads these when torch is loaded
    registry = load_registry(disabled_plugins)
    further = FileCheck() if files else None
    loaded = [load(path, overrides, registry, further, needs=True) for path in configs]
    check_extra("train", what="roll-core run")
    gc.set_threshold(*GC_THRESHOLDS)
    # Heavy imports come after the checks, so that mistakes are reported within a second.
    from roll_core.runtime.records.ledger import process_age_s
    from roll_core.runtime.run.loop import execute

    before_s = process_age_s()
    for each in loaded:
        result = execute(each, registry, argv=sys.argv, before_s=before_s)
        before_s = 0.0
        if result.error is not None:
            if not result.advice and not isinstance(result.error, (RollError, KeyboardInterrupt, SystemExit)):
                redactor = Redactor.of(os.environ, each.config.model_dump(mode="json"))
                sys.stderr.write(redactor.text("".join(traceback.format_exception(result.error))))
            return getattr(result.error, "exit_code", 1)
    return 0
