"""Copies of checkpoints on a file system of fsspec (`checkpoint_store`), for hosts whose disks do not last.

    <url>/<exp_name>/<number>-<8 hex digits>/   config.yaml  run.json  metrics.jsonl  samples.jsonl  …
                                                step-10/  files of the checkpoint, then manifest.json

A checkpoint is complete once its manifest, which is written last and has a digest of itself, can be read.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll_core.errors import CheckpointError
from roll_core.runtime.records.checkpoints import CheckpointStore
from roll_core.runtime.records.manifest import MANIFEST, STEP, parse_manifest, read_manifest

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from roll_core.runtime.records.checkpoints import Checkpoint
    from roll_core.runtime.records.manifest import Manifest

logger = logging.getLogger(__name__)

RUN_FILES = ("config.yaml", "run.json", "metrics.jsonl", "samples.jsonl", "images.jsonl", "trackers")
"""Files and directories of a run that are copied beside its checkpoints, so that a resumed run has its history."""


class RemoteFolder:
    """A folder below which checkpoints are stored. Methods block and raise the errors of the file system."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """`options`: keyword arguments of the file system. Raises `CheckpointError` if it cannot be opened."""
        import fsspec

        self.url = url.rstrip("/")
        try:
            self._files, self._path = fsspec.core.url_to_fs(self.url, **options)
        except Exception as error:  # of the file system's package
            raise CheckpointError(f"{self.url} cannot be opened: {error}") from error
        self._path = self._path.rstrip("/")

    def manifests(self, folders: int = 2) -> dict[str, Manifest]:
        """Manifests of the complete checkpoints at most `folders` below, by path below this folder, newest first."""
        self._files.invalidate_cache()
        found = {}
        try:
            names = self._files.find(self._path, maxdepth=folders + 1)
        except FileNotFoundError:
            return {}
        for name in names:
            folder, _, file = name.rpartition("/")
            if file != MANIFEST or STEP.fullmatch(folder.rpartition("/")[2]) is None:
                continue
            try:
                found[folder.removeprefix(self._path).strip("/")] = parse_manifest(self._files.cat_file(name))
            except CheckpointError as error:
                logger.warning("%s/%s is incomplete and is skipped: %s", self.url, folder, error)
        return dict(sorted(found.items(), key=lambda each: each[1].created, reverse=True))

    def put(self, name: str, source: Path, stop: threading.Event) -> None:
        """Write a file. Raises `CheckpointError` for a wrong size, and soon after another thread sets `stop`."""
        from fsspec.callbacks import Callback

        class Stoppable(Callback):  # type: ignore[misc]
            def call(self, *args: Any, **kwargs: Any) -> None:
                if stop.is_set():
                    raise CheckpointError(f"{name}: the upload was stopped")

        if stop.is_set():
            raise CheckpointError(f"{name}: the upload was stopped")
        target, size = f"{self._path}/{name}", source.stat().st_size
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(source), target, callback=Stoppable())
        self._files.invalidate_cache()
        if source.name.endswith(".jsonl") or source.name == "run.json":  # the run still writes to it
            return
        if (found := self._files.size(target)) != size:
            raise CheckpointError(f"{self.url}/{name} has {found} bytes after its upload instead of {size}")

    def put_checkpoint(self, path: Path, stop: threading.Event) -> None:
        """Write the complete checkpoint at `path` as `step-N/`, its manifest last."""
        for name in read_manifest(path).files:
            self.put(f"{path.name}/{name}", path / name, stop)
        self.put(f"{path.name}/{MANIFEST}", path / MANIFEST, stop)

    def put_run(self, run: Path, stop: threading.Event) -> None:
        """Write `RUN_FILES` of a run directory."""
        for name in RUN_FILES:
            for file in sorted((run / name).rglob("*")) if (run / name).is_dir() else [run / name]:
                if file.is_file():
                    self.put(file.relative_to(run).as_posix(), file, stop)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first, so that an interrupted removal leaves no complete one."""
        with contextlib.suppress(FileNotFoundError):  # an earlier removal was interrupted
            self._files.rm_file(f"{self._path}/{name}/{MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._path}/{name}", recursive=True)

    def read(self, name: str, file: str) -> bytes:
        """Contents of a file of the checkpoint `name`."""
        content: bytes = self._files.cat_file("/".join(part for part in (self._path, name, file) if part))
        return content

    def fetch(self, name: str, into: Path) -> Checkpoint:
        """Copy the checkpoint `name` to `into/checkpoints/step-N` and the run's files to `into`; compare all digests.

        Raises `CheckpointError` if the copy is damaged.
        """
        source = f"{self._path}/{name}".rstrip("/")
        run, _, step = source.rpartition("/")
        target = into / "checkpoints" / step
        manifest = parse_manifest(self.read(name, MANIFEST))
        for file in (*manifest.files, MANIFEST):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # reported as damage
                self._files.get_file(f"{source}/{file}", str(target / file))
        for file in RUN_FILES:
            with contextlib.suppress(FileNotFoundError):
                self._files.get(f"{run}/{file}", str(into / file), recursive=True)
        origin = f"{self.url}/{name}".rstrip("/")
        return replace(CheckpointStore.open(target), origin=origin)


def fetch_newest(folder: RemoteFolder, into: Path, *, after: float = 0.0) -> Checkpoint | None:
    """Copy the newest intact checkpoint below `folder` that was written after Unix time `after`; None if none is.

    Skips damaged checkpoints with a warning. Raises `CheckpointError` if all are damaged or the store cannot be read.
    """
    damaged: CheckpointError | None = None
    with store_errors(folder.url):
        for name, manifest in folder.manifests().items():
            if manifest.created <= after:
                break
            try:
                return folder.fetch(name, into)
            except CheckpointError as error:
                logger.warning("%s/%s is damaged and is skipped: %s", folder.url, name, error)
                damaged = damaged or error
    if damaged is not None:
        raise damaged
    return None


@contextlib.contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Raise errors of the file system at `url` as `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # of the file system's package
        raise CheckpointError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
