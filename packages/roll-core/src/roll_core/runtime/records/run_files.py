"""Writes the files of a run directory: JSON Lines, a full disk, and files deleted during the run.

Each fault ends the run with one `RunFileError`, which names the file and the remedy. A JSON Lines file has one object
per line, and is readable even if the last line is truncated. JSON has no NaN or infinity. They are written as the
strings `NaN`, `Infinity` and `-Infinity`, which `number` parses.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import CheckpointError, RollError, RunFileError, chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import IO

log = logging.getLogger(__name__)

_REMEDY = (
    "free space, lower max_ckpt_to_keep or set output_dir to another disk, and start again; resume_from_checkpoint:"
    " auto continues from the last checkpoint"
)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `RunFileError` with `path` if the block fails to write it.

    Converts an `OSError` about a file in the directory of `path`, and a full disk as libraries and workers report it.
    Other exceptions pass unchanged.
    """
    try:
        yield
    except RunFileError:
        raise
    except Exception as error:
        if disk_is_full(error):
            raise RunFileError(f"no space left for {path} ({_free(path)}); {_REMEDY}") from error
        if isinstance(error, OSError) and not isinstance(error, RollError) and _is_below(error.filename, path.parent):
            raise RunFileError(f"{path} cannot be written: {error.strerror or error}") from error
        raise


def explained(error: BaseException, run: Path) -> BaseException:
    """Return a `RunFileError` if a full disk caused `error`; otherwise return `error` unchanged.

    `run` is the run directory, whose free space the message states.
    """
    if isinstance(error, (RunFileError, CheckpointError)) or not disk_is_full(error):
        return error
    temporary = Path(tempfile.gettempdir())
    full = RunFileError(f"a disk is full ({run}: {_free(run)}; {temporary}: {_free(temporary)}): {error}; {_REMEDY}")
    full.__cause__ = error
    return full


def check_in_place(stream: IO[Any] | None, path: Path) -> None:
    """Raise `RunFileError` unless `path` is still the file that `stream` writes to."""
    with contextlib.suppress(FileNotFoundError):  # deleted: reported below
        if stream is not None and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
            return
    raise RunFileError(
        f"{path} was deleted or replaced while the run was writing to it, and later writes are lost: start the run"
        " again, and do not change its directory"
    )


def disk_is_full(error: BaseException | None) -> bool:
    """True if the error or one of its causes is a full disk or an exceeded quota.

    Libraries wrap the `OSError` or only repeat its message, so messages are checked too.
    """
    return any(
        (isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT))
        or (isinstance(each, Exception) and "no space left on device" in str(each).lower())
        for each in chain(error)
    )


def _is_below(file: Any, directory: Path) -> bool:
    """True if `file` is below `directory`, or if the error names no file."""
    return not isinstance(file, str | os.PathLike) or Path(file).absolute().is_relative_to(directory)


def _free(path: Path) -> str:
    """Free space of the disk under `path`, which may not exist yet."""
    with contextlib.suppress(OSError):
        existing = next(each for each in (path, *path.parents) if each.exists())
        return f"{shutil.disk_usage(existing).free / 2**20:.0f} MiB free"
    return "free space unknown"


# -- JSON Lines --------------------------------------------------------------------------------------------------------

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
                log.debug("%s:%d: skipping a line that is not JSON", path, number)
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
