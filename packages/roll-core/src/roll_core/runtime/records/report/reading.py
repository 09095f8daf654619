"""Tolerant readers for the report: values may be missing, truncated or of a wrong type."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)


def as_dicts(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list; empty if `value` is no list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def as_pairs(value: Any) -> list[tuple[str, str]]:
    """The items of a mapping as text; empty if `value` is no mapping."""
    return [(str(k), str(v)) for k, v in value.items()] if isinstance(value, dict) else []


def as_counts(value: Any) -> list[tuple[str, int]]:
    """The numeric items of a mapping as integers; empty if `value` is no mapping."""
    found: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    return [(str(name), int(count)) for name, count in found if isinstance(count, (int, float))]


def text_of(path: Path, from_end: int | None = None) -> str:
    """Text of a file, or of its last `from_end` bytes; empty if it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        logger.debug("%s is not in the report: %s", path, error)
        return ""
    return content[-from_end if from_end else 0 :].decode("utf-8", errors="replace")


def date(seconds_since_epoch: float) -> str:
    """Format Unix seconds as local date and time; empty if out of range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds_since_epoch))
    except (OverflowError, ValueError, OSError):
        return ""


def size(num_bytes: float) -> str:
    """Format bytes for people, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"
