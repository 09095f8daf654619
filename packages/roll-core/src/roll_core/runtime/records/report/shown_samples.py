"""Samples embedded in the report as JSON: a subset for long runs, escaped for use inside a script element."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from roll_core.runtime.records.jsonlines import read_lines

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MOST_SAMPLES = 4000
_MOST_CHARS = 6000


def samples_of(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Samples to show, and the number omitted. Long runs keep whole steps, spread evenly over the run."""
    by_step: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in read_lines(path):
        if isinstance(row.get("step"), int) and "response" in row:
            by_step[row["step"]].append(_sample(row))
    everything = sum(len(rows) for rows in by_step.values())
    steps = sorted(by_step)
    stride = math.ceil(everything / _MOST_SAMPLES) if everything else 1
    kept = [step for index, step in enumerate(steps) if index % stride == 0 or index == len(steps) - 1]
    samples = [row for step in kept for row in by_step[step]]
    return samples, everything - len(samples)


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    shown = (
        "step",
        "split",
        "id",
        "group",
        "tag",
        "prompt",
        "response",
        "reward",
        "failure",
        "finish",
        "response_tokens",
        "version",
    )
    found: dict[str, Any] = {name: _cut(row[name]) for name in shown if row.get(name) not in (None, "")}
    for name in ("metadata", "detail"):
        if isinstance(row.get(name), dict):
            found[name] = {str(k): _cut(v) for k, v in row[name].items()}
    return found


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return (
            value
            if len(value) <= _MOST_CHARS
            else f"{value[:_MOST_CHARS]}… ({len(value) - _MOST_CHARS} more characters)"
        )
    return value if isinstance(value, (int, float, bool)) or value is None else str(value)


def for_script(value: object) -> str:
    """Encode as JSON for a script element. Escapes characters that could end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
