"""Values that may be missing, cut off or nonsense, as what a page can show."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)


def as_dicts(value: Any) -> list[Mapping[str, Any]]:
    """Those items of a list that are mappings."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def as_pairs(value: Any) -> list[tuple[str, str]]:
    """A mapping as text."""
    return [(str(k), str(v)) for k, v in value.items()] if isinstance(value, dict) else []


def as_counts(value: Any) -> list[tuple[str, int]]:
    """A mapping's whole numbers."""
    found: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    return [(str(name), int(count)) for name, count in found if isinstance(count, (int, float))]


def text_of(path: Path, from_end: int | None = None) -> str:
    """A file, or its end; empty where it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        logger.debug("%s is not in the report: %s", path, error)
        return ""
    return content[-from_end if from_end else 0 :].decode("utf-8", errors="replace")


def date(seconds_since_epoch: float) -> str:
    """Of a time since 1970; empty where there is no such date."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds_since_epoch))
    except (OverflowError, ValueError, OSError):
        return ""


def size(num_bytes: float) -> str:
    """For people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"
