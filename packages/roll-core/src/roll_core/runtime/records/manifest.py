"""`manifest.json` of a checkpoint, with sizes and SHA-256 digests of its files, and their verification."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeGuard

from roll_core.errors import CheckpointError

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping
    from pathlib import Path

MANIFEST = "manifest.json"
FORMAT = 2

STEP = re.compile(r"step-(\d+)")
"""Matches the directory name of a checkpoint."""
_CHUNK_BYTES = 1 << 20
_LATEST = 253_402_300_799 - 86_400
"""Latest valid creation time in Unix seconds: one day before the maximum of Python's `datetime`."""


def write_manifest(folder: Path, step: int, stop: threading.Event | None = None, *, after: float = 0.0) -> None:
    """Flush and digest all files in `folder` and write the manifest beside them.

    `after`: Unix time of an older checkpoint. The manifest's time is later also if the clock was set back. If another
    thread sets `stop`, raises `CheckpointError` within one chunk (1 MiB) per file.
    """
    created = max(time.time(), min(math.nextafter(after, math.inf), _LATEST))
    manifest = {"format": FORMAT, "step": step, "created": created, "files": _digest_all(folder, stop)}
    write_flushed(folder / MANIFEST, json.dumps(manifest | {"sha256": _self_digest(manifest)}, indent=1))


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a checkpoint's manifest."""

    step: int
    created: float
    """Time of creation in Unix seconds; later than that of any checkpoint which the run continues."""
    files: Mapping[str, Mapping[str, Any]]
    """`bytes` and `sha256` by path, relative to the checkpoint."""

    @property
    def size_bytes(self) -> int:
        """Total size of all files in bytes, as recorded when they were written."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at `path`. Raises `CheckpointError` if it is missing, invalid or modified."""
    file = path / MANIFEST
    try:
        return parse_manifest(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{MANIFEST} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from error


def parse_manifest(content: bytes) -> Manifest:
    """The manifest in `content`. Raises `CheckpointError` if it is invalid or modified."""
    try:
        manifest = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
        raise CheckpointError(f"{MANIFEST} has no format number: roll-core did not write it")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{MANIFEST} has format {manifest['format']}, this ROLL reads format {FORMAT}")
    if manifest.pop("sha256", None) != _self_digest(manifest):
        raise CheckpointError(f"{MANIFEST} is damaged: its contents do not match its own digest")
    step, created, files = manifest.get("step"), manifest.get("created"), manifest.get("files")
    if not _is_size(step):
        raise CheckpointError(f"{MANIFEST}: step is {step!r:.100}, expected a number ≥ 0")
    if not isinstance(created, int | float) or not 0 <= created <= _LATEST:
        raise CheckpointError(f"{MANIFEST}: created is {created!r:.100}, expected seconds since 1970")
    if not isinstance(files, dict):
        raise CheckpointError(f"{MANIFEST}: files is {files!r:.100}, expected a mapping")
    for name, entry in files.items():
        if not is_inside(name):
            raise CheckpointError(f"{MANIFEST}: the file {name!r:.100} is not inside the checkpoint")
        if not isinstance(entry, dict) or not _is_size(entry.get("bytes")) or not isinstance(entry.get("sha256"), str):
            raise CheckpointError(f"{MANIFEST}: {name!r:.100} is {entry!r:.100}, expected bytes and sha256")
    return Manifest(step=step, created=created, files=files)


def is_inside(name: object) -> bool:
    """True if `name` is a path that stays inside the directory it is relative to."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def verify(path: Path, *, digests: bool = True) -> list[str]:
    """List the problems of the checkpoint at `path`, one line each; empty if it is intact.

    Reads all files to compare digests. Without `digests`, reads only the manifest and compares file sizes.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    complete = []
    named = STEP.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        problems.append(f"it is the checkpoint of step {manifest.step} by its {MANIFEST}")
    for name, entry in manifest.files.items():
        file = path / name
        try:
            size = file.stat().st_size if file.is_file() else None
        except OSError:  # not a valid file name
            size = None
        if size is None:
            problems.append(f"{name} is missing")
        elif size != entry["bytes"]:
            problems.append(f"{name} has {size} bytes instead of {entry['bytes']}")
        else:
            complete.append(name)
    if not digests:
        return problems
    for name, digested in zip(complete, _in_parallel([path / name for name in complete]), strict=True):
        if isinstance(digested, OSError):
            problems.append(f"{name} cannot be read: {digested.strerror or digested}")
        elif digested["sha256"] != manifest.files[name]["sha256"]:
            problems.append(f"{name} does not have the digest that was recorded")
    return problems


def _self_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's contents, independent of the file's formatting."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest_all(directory: Path, stop: threading.Event | None) -> dict[str, dict[str, Any]]:
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    entries = {}
    for file, entry in zip(files, _in_parallel(files, flush=True, stop=stop), strict=True):
        if isinstance(entry, OSError):
            raise entry
        entries[file.relative_to(directory).as_posix()] = entry
    return entries


def _in_parallel(
    files: list[Path], flush: bool = False, stop: threading.Event | None = None
) -> list[dict[str, Any] | OSError]:
    """Digest files in threads (hashlib releases the GIL); an unreadable file yields its `OSError`."""

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
                raise CheckpointError(f"{file.name}: stopped before its digest was complete")
            sha.update(buffer[:count])
            size += count
        if flush:
            os.fsync(stream.fileno())
    return {"bytes": size, "sha256": sha.hexdigest()}


def write_flushed(file: Path, text: str) -> None:
    """Write a small file and fsync it before returning."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
