"""Collect the report's contents from the run's files and render the template."""

from __future__ import annotations

import functools
import json
import math
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from roll_core.config.secrets import Redactor
from roll_core.runtime.records.jsonlines import read_lines
from roll_core.runtime.records.record import is_abandoned, read_record, write_atomically
from roll_core.runtime.records.report import tables
from roll_core.runtime.records.report.charts import figure, seconds
from roll_core.runtime.records.report.curves import WEIGHTS, charts_of
from roll_core.runtime.records.report.saved_record import SavedRecord
from roll_core.runtime.records.run_dir import RunDir
from roll_core.runtime.records.tracking import read_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import jinja2

_LOG_LINES = 60
_LOG_BYTES = 200_000
_MOST_SAMPLES = 4000
_MOST_CHARS = 6000
_SAMPLE_FIELDS = (
    "step", "split", "id", "group", "tag", "prompt", "response", "reward", "failure", "finish", "response_tokens",
    "version",
)  # fmt: skip
_TONES = {"finished": "good", "failed": "bad", "killed": "bad", "running": "live"}
"""Colour of the outcome; others are `warn`."""


def write_report(run: Path) -> Path:
    """Write `report.html` of the run directory `run` and return its path. Works also while the run is in progress."""
    run_dir = RunDir(run)
    found = read_record(run_dir.record)
    record = SavedRecord.of(found)
    outcome = "killed" if is_abandoned(found) else record.outcome
    metrics = read_metrics(run_dir.metrics)
    key_charts, sections = charts_of(metrics)
    samples, samples_left_out = _samples(run_dir.samples)
    redacted = Redactor().text
    html = _template().render(
        record=record,
        name=record.name or run_dir.name,
        outcome=outcome,
        tone=_TONES.get(outcome, "warn"),
        facts=list(tables.facts_of(record)),
        tiles=tables.tiles_of(record, metrics),
        key_charts=key_charts,
        sections=[section for section in sections if section.title != WEIGHTS],
        weight_charts=[chart for section in sections if section.title == WEIGHTS for chart in section.charts],
        time=tables.time_table(record, metrics),
        memory=tables.memory_rows(record),
        samples_json=_for_script(samples),
        samples=samples,
        samples_left_out=samples_left_out,
        weight_sync=tables.weight_sync_rows(metrics),
        checkpoints=tables.checkpoint_rows(run_dir),
        config=_yaml_lines(redacted(_text_of(run_dir.config))),
        environment=list(tables.environment_rows(record)),
        log=redacted("\n".join(_text_of(run_dir.log, _LOG_BYTES).splitlines()[-_LOG_LINES:])),
        written=tables.date(time.time()),
        has_record=bool(found),
        has_metrics=bool(metrics),
    )
    write_atomically(run_dir.report, html)
    return run_dir.report


@functools.cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("roll_core.runtime", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"figure": figure, "seconds": seconds, "date": tables.date}
    return environment.get_template("report.html.j2")


def _samples(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Samples to show, and the number omitted. Long runs keep whole steps, spread evenly over the run."""
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in read_lines(path):
        if isinstance(row.get("step"), int) and "response" in row:
            by_step[row["step"]].append(_sample(row))
    total = sum(len(rows) for rows in by_step.values())
    steps = sorted(by_step)
    kept = {*steps[:: math.ceil(total / _MOST_SAMPLES) or 1], *steps[-1:]}
    samples = [row for step in steps if step in kept for row in by_step[step]]
    return samples, total - len(samples)


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {name: _shortened(row[name]) for name in _SAMPLE_FIELDS if row.get(name) not in (None, "")}
    for name in ("metadata", "detail"):
        if isinstance(row.get(name), dict):
            shown[name] = {key: _shortened(value) for key, value in row[name].items()}
    return shown


def _shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MOST_CHARS:
        return f"{value[:_MOST_CHARS]}… ({len(value) - _MOST_CHARS} more characters)"
    return value if isinstance(value, (str, int, float)) or value is None else str(value)


def _for_script(value: object) -> str:
    """Encode as JSON for a script element. Escapes characters that could end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _yaml_lines(text: str) -> list[tuple[str, str]]:
    """Split each line into key and rest, for syntax colouring."""
    lines = []
    for line in text.splitlines():
        key, colon, rest = line.partition(":")
        is_key = colon and (not rest or rest[0] == " ") and not key.lstrip(" -").startswith(("#", '"', "'"))
        lines.append((key + colon, rest) if is_key else ("", line))
    return lines


def _text_of(path: Path, from_end: int = 0) -> str:
    """Text of a file, or of its last `from_end` bytes; empty if it cannot be read."""
    try:
        return path.read_bytes()[-from_end:].decode("utf-8", errors="replace")
    except OSError:
        return ""
