"""Writes the files of a run directory: JSON Lines, samples and images, a full disk, files deleted during the run.

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
from base64 import b64encode
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import CheckpointError, RollError, RunFileError, chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import IO

    from roll_core.runtime.records.media_folder import MediaFolder
    from roll_core.types import Sample, TokenIds, TurnRecord

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
        (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT))
        or (isinstance(cause, Exception) and "no space left on device" in str(cause).lower())
        for cause in chain(error)
    )


def _is_below(file: Any, directory: Path) -> bool:
    """True if `file` is below `directory`, or if the error names no file."""
    return not isinstance(file, str | os.PathLike) or Path(file).absolute().is_relative_to(directory.absolute())


def _free(path: Path) -> str:
    """Free space of the disk under `path`, which may not exist yet."""
    with contextlib.suppress(OSError):
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        return f"{shutil.disk_usage(existing).free / 2**20:.0f} MiB free"
    return "free space unknown"


# -- JSON Lines --------------------------------------------------------------------------------------------------------

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class LineWriter:
    """Appends objects to a file, unbuffered: each line is passed to the operating system before `append` returns."""

    def __init__(self, path: Path, *, history: Path | None = None, resumed_step: int = 0) -> None:
        """Open `path` for appending. If its last line is truncated, a line break is written first.

        A resumed run first copies the lines of its predecessor's file up to `resumed_step`. `history` is the directory
        of the run that this one continues.
        """
        self.path = path
        if history is not None:
            copy_lines(history / path.name, path, lambda row: row if _step(row) <= resumed_step else None)
        self._open()

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one object. Raises `RunFileError`."""
        line = encode(row)
        with writing(self.path):
            while line:  # a nearly full disk writes only a part
                line = line[self._stream.write(line) :]

    def flush(self) -> None:
        """Return once all lines are on the disk. Raises `RunFileError`."""
        with writing(self.path):
            os.fsync(self._stream.fileno())

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
            except (ValueError, RecursionError):
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
        try:
            with temporary.open("wb") as stream:
                for row in read_lines(source):
                    if (changed := change(row)) is not None:
                        stream.write(encode(changed))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


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


# -- samples and images ------------------------------------------------------------------------------------------------

_PER_STEP = 8
"""Maximum number of samples per step and split."""
_PER_GROUP = 4
_METADATA_CHARS = 500
"""Longer metadata strings are truncated to this length."""


class SamplesFile(LineWriter):
    """Writes the first samples of each step: at most 8 per split and at most 4 per prompt.

    The last row of a call has the number of samples that were left out, `left_out`.
    """

    def __init__(
        self,
        path: Path,
        decode: Callable[[TokenIds], str],
        *,
        media: MediaFolder | None = None,
        history: Path | None = None,
        resumed_step: int = 0,
    ) -> None:
        """`decode` converts token ids to text, `media` stores the samples' images (default: beside `path`). `history`
        and `resumed_step` are as for `LineWriter`."""
        from roll_core.runtime.records.media_folder import MediaFolder

        super().__init__(path, history=history, resumed_step=resumed_step)
        self._decode, self._media = decode, media or MediaFolder(path.parent)
        self._written: Counter[str] = Counter()
        self._step = -1

    def write(self, step: int, samples: Sequence[Sample], *, split: str = "train", limited: bool = True) -> None:
        """Record the first of `samples`. The limit per step covers all calls of a step, that per prompt each call.

        Without `limited`, record all.
        """
        if step != self._step:
            self._step, self._written = step, Counter()
        in_group: Counter[str] = Counter()
        chosen: list[Sample] = []
        for sample in samples:
            if not limited or (self._written[split] < _PER_STEP and in_group[sample.group_id] < _PER_GROUP):
                in_group[sample.group_id] += 1
                self._written[split] += 1
                chosen.append(sample)
        rows = [self._row(step, split, sample) for sample in chosen]
        if rows and len(chosen) < len(samples):
            rows[-1]["left_out"] = len(samples) - len(chosen)
        for row in rows:
            self.append(row)

    def _row(self, step: int, split: str, sample: Sample) -> dict[str, Any]:
        row: dict[str, Any] = {
            "step": step,
            "split": split,
            "id": sample.id,
            "group": sample.group_id,
            "tag": sample.tag,
            "prompt": self._decode(sample.prompt_ids),
            "response": self._decode(sample.response_ids),
            "finish": sample.finish_reason,
            "prompt_tokens": len(sample.prompt_ids),
            "response_tokens": len(sample.response_ids),
        }
        if sample.media:
            row["images"] = self._media.put(sample.media)
        if sample.player:
            row["player"] = sample.player
        if sample.rollout is not None:
            row["turns"] = [
                {
                    "context": self._decode(turn.context_ids),
                    "response": self._decode(turn.sampled_ids),
                    "reward": turn.reward,
                    "finish": turn.finish_reason,
                    "versions": sorted(set(turn.versions.tolist())),
                    **({} if turn.parent == (index - 1 if index else None) else {"parent": turn.parent}),
                    **({} if turn.loss_mask.all() else {"trained": self._trained(turn)}),
                }
                for index, turn in enumerate(sample.rollout.turns)
            ]
        if sample.reward is not None:
            row["reward"] = sample.reward.value
            if sample.reward.failure:
                row["failure"] = sample.reward.failure
            if sample.reward.detail:
                row["detail"] = dict(sample.reward.detail)
        if sample.versions.size:
            row["version"] = int(sample.versions.max())
        metadata = _short(sample.metadata, row["prompt"])
        if metadata:
            row["metadata"] = metadata
        return row

    def _trained(self, turn: TurnRecord) -> list[tuple[str, bool]]:
        """Parts of a response, and whether they are in the loss mask."""
        import numpy as np

        cuts = [0, *(np.flatnonzero(np.diff(turn.loss_mask)) + 1).tolist(), len(turn.sampled_ids)]
        return [
            (self._decode(turn.sampled_ids[begin:end]), bool(turn.loss_mask[begin]))
            for begin, end in pairwise(cuts)
            if begin < end
        ]


class OptionalLines:
    """Appends objects to a file that exists only if there are any."""

    def __init__(self, path: Path, *, history: Path | None = None, resumed_step: int = 0) -> None:
        """`history` and `resumed_step` are as for `LineWriter`."""
        self.path = path
        self._file: LineWriter | None = None
        if history is not None and (history / path.name).exists():
            self._file = LineWriter(path, history=history, resumed_step=resumed_step)

    def append(self, row: Mapping[str, Any], *, flush: bool = False) -> None:
        """Append one object. `flush`: return once it is on the disk. Raises `RunFileError`."""
        self._file = self._file or LineWriter(self.path)
        self._file.append(row)
        if flush:
            self._file.flush()

    def check(self) -> None:
        """Raise `RunFileError` if the file was deleted or replaced."""
        if self._file is not None:
            self._file.check()

    def close(self) -> None:
        """Close the file; may be called more than once."""
        if self._file is not None:
            self._file.close()


class ImagesFile(OptionalLines):
    """Writes grids of images, each with captions."""

    def write(self, step: int, images: Sequence[bytes], captions: Sequence[str], *, split: str) -> None:
        """Record one grid of PNG images."""
        shown = zip(images, captions, strict=True)
        rows = [{"png": b64encode(png).decode("ascii"), "caption": caption} for png, caption in shown]
        self.append({"step": step, "split": split, "images": rows})


def _short(metadata: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    """Metadata columns with numbers or (truncated) strings, without the id and copies of the prompt."""
    shortened: dict[str, Any] = {}
    for name, value in metadata.items():
        if name == "id" or value == prompt:
            continue
        if isinstance(value, str):
            shortened[name] = value if len(value) <= _METADATA_CHARS else f"{value[:_METADATA_CHARS]}…"
        elif isinstance(value, (bool, int, float)):
            shortened[name] = value
    return shortened
