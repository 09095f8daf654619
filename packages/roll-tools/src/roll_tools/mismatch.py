"""`roll-core doctor mismatch`: names the causes why engine and trainer give the same tokens different logprobs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from roll_core.runtime.records.mismatch import read_logprobs
from roll_tools.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from roll_core.plugins.registry import Registry
    from roll_core.runtime.records.mismatch import Diagnosis


def show_mismatch(
    source: Path,
    overrides: Sequence[str],
    registry: Registry,
    *,
    step: int | None,
    threshold: float | None,
    as_json: bool,
) -> int:
    """Print the causes of the gap of a run's recorded tokens, or of the trainer and engine of a config.

    Returns the exit code: 1 if the gap exceeds `threshold`, by default the noise, otherwise 0. Raises
    `RunDirectoryError` or `RecordingError` for a run without logprobs.
    """
    diagnosis = read_logprobs(open_run(source).path, step).diagnose()
    bound = diagnosis.noise if threshold is None else threshold
    exceeds = not diagnosis.gap <= bound
    if as_json:
        sys.stdout.write(json.dumps({**diagnosis.as_json(), "threshold": bound, "ok": not exceeds}, indent=2) + "\n")
    else:
        _show(diagnosis)
    return 1 if exceeds else 0


def _show(diagnosis: Diagnosis) -> None:
    from roll_tools.output import findings_table, open_console

    console = open_console()
    console.print(
        f"gap {diagnosis.gap:.3g} nats, mean |engine's logprob - trainer's logprob| of {diagnosis.num_tokens} tokens;"
        f" noise {diagnosis.noise:.3g}"
    )
    rows = [
        (
            "error",
            f"{cause.name} {cause.share:.0%}",
            cause.evidence,
            cause.fix,
            f"{cause.before:.3g} → {cause.after:.3g}",
        )
        for cause in diagnosis.causes
    ]
    rows += [("note", "", note, "", "") for note in diagnosis.notes]
    rows += [("warning", "not examined", reason, "", "") for reason in diagnosis.not_examined]
    if rows:
        console.print(findings_table(("cause", "measured", "gap"), rows))
    console.print(diagnosis.summary())
