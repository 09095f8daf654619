"""Files of a run directory: a full disk, and files deleted while the run wrote to them.

Each fault ends the run with one `RunFileError`, which names the file and the remedy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import CheckpointError, RollError, RunFileError, chain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

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
