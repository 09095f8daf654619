"""Checkpoints that are there completely or not at all: `checkpoints/step-N/` with a manifest of digests.

writing(N):  .step-N.tmp-<host>-<pid>-<x>/  --fsync, manifest.json-->  rename  -->  step-N/
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from roll_core.errors import CheckpointError, RollError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)
T = TypeVar("T")

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 2

_STEP = re.compile(r"step-(\d+)")
_WORKING = re.compile(r"\.step-\d+\.(?:tmp|old)-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")
_CHUNK_BYTES = 1 << 20
_FOREIGN_AGE_S = 24 * 3600.0
"""A working directory of another host, of whose processes nothing is known, is swept when it is so old."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: Path

    @classmethod
    def at(cls, path: Path) -> Checkpoint:
        """What stands at `path`, however damaged it is: its step is told by its name, else by its manifest, else 0."""
        match = _STEP.fullmatch(path.name)
        if match:
            return cls(int(match[1]), path)
        try:
            return cls(read_manifest(path).step, path)
        except CheckpointError:
            return cls(0, path)

    def state(self) -> dict[str, Any]:
        """What was given as `state` when it was written."""
        file = self.path / STATE
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{file} holds no mapping")
        return found


class CheckpointStore:
    """The checkpoints of one run. One process writes; any may read."""

    def __init__(self, directory: Path, keep: int = 0) -> None:
        """`keep` newest checkpoints stay, 0 keeps all. Touches nothing."""
        self.directory = directory
        self.keep = keep

    @staticmethod
    def is_checkpoint(path: Path) -> bool:
        """Whether `path` is a checkpoint by its looks; it may be damaged."""
        return (path / MANIFEST).is_file() or (_STEP.fullmatch(path.name) is not None and path.is_dir())

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """The checkpoint at `path`, verified. Raises `CheckpointError` that says what is damaged."""
        problems = verify(path)
        if problems:
            others = [c for c in CheckpointStore(path.parent).list() if c.path != path and not verify(c.path)]
            way_out = (
                f"the last good one beside it is {others[-1].path}" if others else "no other one beside it is good"
            )
            raise CheckpointError(f"checkpoint {path} is damaged: {_enumerate(problems)}; {way_out}")
        return Checkpoint(read_manifest(path).step, path)

    def list(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first; not verified."""
        if not self.directory.is_dir():
            return []
        found = []
        for path in self.directory.iterdir():
            match = _STEP.fullmatch(path.name)
            if match and path.is_dir():
                found.append(Checkpoint(int(match[1]), path))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def latest_good(self) -> Checkpoint | None:
        """The newest checkpoint that is intact, read back in full. None if there is none at all.

        Damaged ones are passed over with a warning that says what is wrong. Raises `CheckpointError` if all are.
        """
        damaged = []
        for checkpoint in reversed(self.list()):
            problems = verify(checkpoint.path)
            if not problems:
                return checkpoint
            damaged.append(f"{checkpoint.path.name} ({_enumerate(problems)})")
            logger.warning("checkpoint %s is damaged and is passed over: %s", checkpoint.path, _enumerate(problems))
        if damaged:
            raise CheckpointError(f"every checkpoint in {self.directory} is damaged: {', '.join(damaged)}")
        return None

    @contextlib.contextmanager
    def writing(self, step: int, state: Mapping[str, Any], *, stop: threading.Event | None = None) -> Iterator[Path]:
        """A directory to write into. It becomes `step-<step>` when the block ends, and vanishes if the block raises.

        `state` is kept as JSON beside what the block writes. Blocks while everything is flushed and digested; older
        checkpoints beyond `keep` are removed afterwards. A full disk is a `CheckpointError`, the checkpoints before
        it are untouched. `stop` may be set by another thread: what blocks then raises `CheckpointError` soon.
        """
        self.sweep()
        working = self._working(step, "tmp")
        try:
            working.mkdir(parents=True)
            _write(working / STATE, json.dumps(state, ensure_ascii=False, allow_nan=False, indent=1))
            yield working
            manifest = {"format": FORMAT, "step": step, "created": time.time(), "files": _digest_all(working, stop)}
            _write(working / MANIFEST, json.dumps(manifest | {"sha256": _self_digest(manifest)}, indent=1))
            _flush_directories(working)
            self._publish(working, step)
        except BaseException as error:
            shutil.rmtree(working, ignore_errors=True)
            if _disk_is_full(error):
                raise CheckpointError(self._full(step)) from error
            if isinstance(error, OSError) and not isinstance(error, RollError):
                raise CheckpointError(f"checkpoint of step {step} could not be written: {error}") from error
            raise
        self._retire()

    @contextlib.asynccontextmanager
    async def writing_aside(self, step: int, state: Mapping[str, Any]) -> AsyncIterator[Path]:
        """As `writing`, but what blocks is done in a thread: the event loop goes on, and cancelling ends it soon."""
        stop = threading.Event()
        writing = self.writing(step, state, stop=stop)
        path = writing.__enter__()
        try:
            yield path
        except BaseException as error:
            writing.__exit__(type(error), error, error.__traceback__)
            raise
        await _in_thread(lambda: writing.__exit__(None, None, None), stop)

    def sweep(self) -> None:
        """Remove what processes that are gone left half-written."""
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            match = _WORKING.fullmatch(path.name)
            if match and _abandoned(path, match["host"], int(match["pid"])):
                logger.info("removing %s, which a process that is gone left half-written", path)
                shutil.rmtree(path, ignore_errors=True)

    def _working(self, step: int, kind: str) -> Path:
        return self.directory / f".step-{step}.{kind}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"

    def _publish(self, working: Path, step: int) -> None:
        target = self.directory / f"step-{step}"
        replaced = self._move_aside(target, step) if target.exists() else None
        os.rename(working, target)
        _fsync(self.directory)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def _move_aside(self, target: Path, step: int) -> Path:
        """Out of sight in one act, so that a removal that is killed half-way leaves nothing that looks complete."""
        aside = self._working(step, "old")
        os.rename(target, aside)
        return aside

    def _retire(self) -> None:
        if not self.keep:
            return
        for checkpoint in self.list()[: -self.keep]:
            shutil.rmtree(self._move_aside(checkpoint.path, checkpoint.step), ignore_errors=True)

    def _full(self, step: int) -> str:
        free = shutil.disk_usage(self.directory).free if self.directory.is_dir() else 0
        before = self.list()
        kept = f"the last checkpoint is {before[-1].path}" if before else "there is no earlier checkpoint"
        return (
            f"no space for the checkpoint of step {step} in {self.directory} ({free / 2**20:.0f} MiB free); {kept};"
            " make room, lower max_ckpt_to_keep or set output_dir to another disk"
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    created: float
    """Seconds since 1970."""
    files: Mapping[str, Mapping[str, Any]]
    """`bytes` and `sha256` by path, relative to the checkpoint."""

    @property
    def size_bytes(self) -> int:
        """Of all files together, as they were written."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises `CheckpointError` if it is not as it was written."""
    file = path / MANIFEST
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{MANIFEST} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("format"), int):
        raise CheckpointError(f"{MANIFEST} is not one of ours")
    if found["format"] != FORMAT:
        raise CheckpointError(f"{MANIFEST} has format {found['format']}, this ROLL reads format {FORMAT}")
    if found.pop("sha256", None) != _self_digest(found):
        raise CheckpointError(f"{MANIFEST} does not have the digest that it records of itself")
    return Manifest(step=found["step"], created=found["created"], files=found["files"])


def verify(path: Path, *, digests: bool = True) -> list[str]:
    """What is wrong with the checkpoint at `path`, one line for each thing; empty if it is intact.

    Reads all of it; without `digests` only the manifest, and the sizes of the files.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    whole = []
    named = _STEP.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        problems.append(f"it is the checkpoint of step {manifest.step} by its {MANIFEST}")
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif (size := file.stat().st_size) != entry["bytes"]:
            problems.append(f"{name} has {size} bytes instead of {entry['bytes']}")
        else:
            whole.append(name)
    if not digests:
        return problems
    for name, found in zip(whole, _in_parallel([path / name for name in whole]), strict=True):
        if isinstance(found, OSError):
            problems.append(f"{name} cannot be read: {found.strerror or found}")
        elif found["sha256"] != manifest.files[name]["sha256"]:
            problems.append(f"{name} does not have the digest that was recorded")
    return problems


def _self_digest(manifest: Mapping[str, Any]) -> str:
    """Of what a manifest says, however it is laid out in the file."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest_all(directory: Path, stop: threading.Event | None) -> dict[str, dict[str, Any]]:
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    entries = {}
    for file, found in zip(files, _in_parallel(files, flush=True, stop=stop), strict=True):
        if isinstance(found, OSError):
            raise found
        entries[file.relative_to(directory).as_posix()] = found
    return entries


def _in_parallel(
    files: list[Path], flush: bool = False, stop: threading.Event | None = None
) -> list[dict[str, Any] | OSError]:
    """hashlib lets go of the GIL, so threads help."""

    def digest(file: Path) -> dict[str, Any] | OSError:
        try:
            return _digest(file, flush, stop)
        except OSError as error:
            return error

    if len(files) < 2:
        return [digest(file) for file in files]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1, len(files))) as pool:
        return list(pool.map(digest, files))


def _digest(file: Path, flush: bool, stop: threading.Event | None) -> dict[str, Any]:
    sha = hashlib.sha256()
    size = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            if stop is not None and stop.is_set():
                raise CheckpointError(f"{file.name}: it was not waited for until its digest was there")
            sha.update(buffer[:count])
            size += count
        if flush:
            os.fsync(stream.fileno())
    return {"bytes": size, "sha256": sha.hexdigest()}


async def _in_thread(function: Callable[[], T], stop: threading.Event) -> T:
    """Its result. Cancelling sets `stop`, and waits until the thread has noticed."""
    working = asyncio.create_task(asyncio.to_thread(function))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({working})
        if working.exception() is not None:
            logger.debug("writing a checkpoint was stopped: %s", working.exception())
        raise


def _write(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _flush_directories(root: Path) -> None:
    for path in [root, *(p for p in root.rglob("*") if p.is_dir())]:
        _fsync(path)


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _abandoned(path: Path, host: str, pid: int) -> bool:
    if host == socket.gethostname():
        return pid != os.getpid() and not psutil.pid_exists(pid)
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > _FOREIGN_AGE_S
    return False


def _disk_is_full(error: BaseException | None) -> bool:
    """Libraries wrap the system's error: it is looked for in the whole chain, and at last by its words."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(error, Exception) and "no space left on device" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _enumerate(problems: list[str], limit: int = 3) -> str:
    shown = "; ".join(problems[:limit])
    return shown if len(problems) <= limit else f"{shown}; and {len(problems) - limit} more"
