"""JSON Lines files: written during a run, one object per line, readable even if the last line is truncated.

JSON has no NaN or infinity. They are written as the strings `NaN`, `Infinity` and `-Infinity`, which `number` parses.
"""

from __future__ import annotations

import json
import logging
import math
import os
from typing import TYPE_CHECKING, Any

from roll_core.runtime.records.run_files import check_in_place, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class LineWriter:
    """Appends objects to a file, unbuffered: each line is passed to the operating system before `append` returns."""

    def __init__(self, path: Path, *, history: Path | None = None, resumed_step: int = 0) -> None:
        """Open `path` for appending. If its last line is truncated, a line break is written first.

        A resumed run first copies the lines of `history` up to `resumed_step`. `history` is the file of the run that
        this one continues, or `path` itself.
        """
        self.path = path
        if history is not None:
            copy_lines(history, path, lambda row: row if _step(row) <= resumed_step else None)
        self._open()

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one object. Raises `RunFileError`."""
        line = encode(row)
        with writing(self.path):
            while line:  # a nearly full disk writes only a part
                line = line[self._stream.write(line) :]

    def check(self) -> None:
        """Raise `RunFileError` if the file was deleted or replaced."""
        check_in_place(self._stream, self.path)

    def close(self) -> None:
        """Close the file; may be called more than once."""
        self._stream.close()

    def _open(self) -> None:
        with writing(self.path):
            self._stream = self.path.open("ab+", buffering=0)
            if self._stream.seek(0, os.SEEK_END):
                self._stream.seek(-1, os.SEEK_END)
                if self._stream.read(1) != b"\n":
                    self._stream.write(b"\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file in order; nothing if the file does not exist. Skips lines that are no JSON object.

    The file may be growing, truncated, or corrupted in the middle.
    """
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        return
    with stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                logger.debug("%s:%d: skipping a line that is not JSON", path, number)
                continue
            if isinstance(row, dict):
                yield row


def copy_lines(source: Path, target: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Apply `change` to every object of `source` and write the results to `target` atomically.

    An object for which `change` returns None is dropped. `source` and `target` may be the same file.
    """
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    with writing(target):
        with temporary.open("wb") as stream:
            for row in read_lines(source):
                if (changed := change(row)) is not None:
                    stream.write(encode(changed))
        os.replace(temporary, target)


def encode(row: Mapping[str, Any]) -> bytes:
    """Encode an object as one line of JSON, with the line break."""
    text = json.dumps(safe(row), ensure_ascii=False, allow_nan=False, default=_plain)
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def safe(value: Any) -> Any:
    """Copy a plain value with non-finite numbers replaced by strings."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(k): safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [safe(v) for v in value]
    return value


def number(value: Any) -> float | None:
    """Parse a decoded value as a number, including non-finite ones; None if it is no number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    return _NON_FINITE.get(value) if isinstance(value, str) else None


def _plain(value: Any) -> Any:
    """Convert numpy scalars and arrays, or other objects with `tolist`, to plain values; others to `str`."""
    plain = getattr(value, "tolist", None)
    return safe(plain()) if callable(plain) else str(value)


def _step(row: Mapping[str, Any]) -> float:
    step = row.get("step")
    return step if isinstance(step, int) else math.inf
