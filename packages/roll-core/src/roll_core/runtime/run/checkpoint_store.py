"""Copies of checkpoints on a file system of fsspec (`checkpoint_store`), for hosts whose disks do not last.

    <url>/<exp_name>/<number>-<8 hex digits>/   config.yaml  run.json  metrics.jsonl  samples.jsonl  …
                                                step-10/  files of the checkpoint, then manifest.json

    RunSaver ─► completed ─► submit ─► a task ─► a thread: files, then the manifest ─► retention in the store

A checkpoint is complete once its manifest, which is written last and has a digest of itself, can be read. Steps do not
wait for an upload. The end of the run waits until nothing is pending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from roll_core.errors import CheckpointError, one_line
from roll_core.runtime.cluster.concurrency import cancel_all, in_daemon_thread
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.manifest import MANIFEST, STEP, parse_manifest, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from roll_core.runtime.records.checkpoint_directory import BestCheckpoint, Checkpoint
    from roll_core.runtime.records.manifest import Manifest

logger = logging.getLogger(__name__)

RUN_FILES = (
    "config.yaml", "run.json", "metrics.jsonl", "samples.jsonl", "scores.jsonl", "images.jsonl", "media", "trackers"
)  # fmt: skip
"""Files and directories of a run that are copied beside its checkpoints, so that a resumed run has its history."""
RETRY_S = (1.0, 5.0)
"""Pauses in seconds before an upload is tried again."""


class CheckpointUploader:
    """Copies the checkpoints of one run in the background, one at a time. Lives on the run's event loop.

    A failed upload is a warning, and an error of the next step if `required`. Local checkpoints stay until their
    upload has ended.
    """

    def __init__(
        self,
        folder: RemoteFolder,
        local: CheckpointDirectory,
        run: Path,
        *,
        required: bool,
        earlier: Sequence[tuple[RemoteFolder, int]] = (),
    ) -> None:
        """`folder` is that of this run alone. `local` retains the checkpoints that wait for their upload.

        `earlier`: folders of the attempts that the run continues, each with its last step there. Retention counts their
        copies too.
        """
        self._folder, self._local, self._run, self._required = folder, local, run, required
        self._pending: list[Checkpoint] = []
        self._earlier = list(earlier)
        self._copies: list[tuple[RemoteFolder, int]] = []
        """Complete copies of this run and of those that it continues, as folders and steps, oldest first."""
        self._best: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = threading.Event()
        self._error: CheckpointError | None = None
        self._failures = 0
        self._metrics: dict[str, float] = {}

    async def probe(self) -> None:
        """Write the run's files, to find an unreachable store before training. Raises only if it is `required`."""
        try:
            await in_daemon_thread(partial(self._folder.put_run, self._run, self._stop), name="roll-upload")
        except Exception as error:  # of the file system's package
            self._failed("the run's files were", error)
            self.check()

    def submit(self, checkpoint: Checkpoint, best: BestCheckpoint | None) -> None:
        """Upload a complete checkpoint. Skips older ones whose upload has not begun, except the best one."""
        self._best = best.step if best is not None else None
        for skipped in [upload for upload in self._pending if upload.step != self._best]:
            logger.warning("step %d is not uploaded: step %d is newer", skipped.step, checkpoint.step)
            self._pending.remove(skipped)
            self._local.pinned.discard(skipped.step)
        self._pending.append(checkpoint)
        # Retention must not remove files that are being uploaded.
        self._local.pinned.add(checkpoint.step)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._upload_pending(), name="checkpoint uploads")

    def check(self) -> None:
        """Raise the error of a failed upload if uploads are `required`. Does not block."""
        if self._required and self._error is not None:
            raise self._error

    def take_metrics(self) -> dict[str, float]:
        """Newest uploaded step, seconds of its upload, and failed uploads, if they changed since the last call."""
        taken, self._metrics = self._metrics, {}
        return taken

    async def finish(self) -> None:
        """Wait until no upload is pending, and remove the local checkpoints that were retained for their upload only.

        No checkpoint may be in progress. Raises `CheckpointError` if uploads are `required` and one failed.
        """
        await self._wait()
        self.check()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for uploads, also after an `Exception`. Cancelling the run stops them."""
        try:
            if error is None:
                await self.finish()
            elif isinstance(error, Exception):
                await self._wait()
        finally:
            # A thread cannot be cancelled: it tests this event between parts of a file.
            self._stop.set()
            if self._task is not None:
                await cancel_all([self._task])

    async def _wait(self) -> None:
        if self._task is not None:
            await self._task
            await asyncio.to_thread(self._local.retire)

    async def _upload_pending(self) -> None:
        while self._pending:
            checkpoint = self._pending.pop(0)
            started = time.monotonic()
            try:
                await self._upload(checkpoint)
            except Exception as error:  # of the file system's package
                self._failed(f"the checkpoint of step {checkpoint.step} was", error)
            else:
                self._error = None
                self._metrics["checkpoint_store/step"] = float(checkpoint.step)
                self._metrics["checkpoint_store/seconds"] = time.monotonic() - started
            finally:
                self._local.pinned.discard(checkpoint.step)

    async def _upload(self, checkpoint: Checkpoint) -> None:
        for pause_s in (*RETRY_S, None):
            try:
                await in_daemon_thread(partial(self._copy, checkpoint), name="roll-upload")
                break
            except Exception as error:  # of the file system's package
                if pause_s is None or self._stop.is_set():
                    raise
                logger.info("step %d: the upload is tried again in %g s: %s", checkpoint.step, pause_s, error)
                await asyncio.sleep(pause_s)
        self._copies.append((self._folder, checkpoint.step))
        await in_daemon_thread(self._retire, name="roll-upload")

    def _copy(self, checkpoint: Checkpoint) -> None:
        self._folder.put_run(self._run, self._stop)
        self._folder.put_checkpoint(checkpoint.path, self._stop)

    def _retire(self) -> None:
        """Remove the oldest copies beyond `max_ckpt_to_keep`, except the best one.

        A failed removal is a warning, and is repeated after the next upload.
        """
        if not self._local.keep:
            return
        while self._earlier:
            folder, last = self._earlier.pop()
            steps = [manifest.step for manifest in folder.manifests(folders=1).values()]
            self._copies += [(folder, step) for step in steps if step <= last]
        self._copies.sort(key=lambda copy: copy[1])
        for folder, step in self._copies[: -self._local.keep]:
            if step == self._best:
                continue
            try:
                folder.remove(f"step-{step}")
            except Exception as error:  # of the file system's package
                logger.warning("%s/step-%d could not be removed: %s", folder.url, step, one_line(error))
            else:
                self._copies.remove((folder, step))

    def _failed(self, what: str, error: Exception) -> None:
        message = f"{what} not copied to {self._folder.url}: {one_line(error)}"
        logger.warning("checkpoint_store: %s; local checkpoints are complete", message)
        self._error = CheckpointError(f"checkpoint_store: {message}")
        self._error.__cause__ = error
        self._failures += 1
        self._metrics["checkpoint_store/failures"] = float(self._failures)


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
        """Manifests of the complete checkpoints at most `folders` below, by path below this folder: those of the newest
        run first, its last step first. The clock may have been set back between two steps."""
        self._files.invalidate_cache()
        manifests = {}
        try:
            names = self._files.find(self._path, maxdepth=folders + 1)
        except FileNotFoundError:
            return {}
        for name in names:
            folder, _, file = name.rpartition("/")
            if file != MANIFEST or STEP.fullmatch(folder.rpartition("/")[2]) is None:
                continue
            try:
                manifests[folder.removeprefix(self._path).strip("/")] = parse_manifest(self._files.cat_file(name))
            except FileNotFoundError:  # a run in progress has removed it meanwhile
                continue
            except CheckpointError as error:
                logger.warning("%s/%s is incomplete and is skipped: %s", self.url, folder, error)
        newest: dict[str, float] = {}
        for name, manifest in manifests.items():
            newest[_run_of(name)] = max(manifest.created, newest.get(_run_of(name), 0.0))
        return dict(sorted(manifests.items(), key=lambda item: (newest[_run_of(item[0])], item[1].step), reverse=True))

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
        if (size_there := self._files.size(target)) != size:
            raise CheckpointError(f"{self.url}/{name} has {size_there} bytes after its upload instead of {size}")

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
        return replace(CheckpointDirectory.open(target), origin=origin)


def fetch_newest(folder: RemoteFolder, into: Path, *, after: float = 0.0) -> Checkpoint | None:
    """Copy the newest intact checkpoint below `folder` that was written after Unix time `after`; None if none is.

    Skips damaged checkpoints with a warning. Raises `CheckpointError` if all are damaged or the store cannot be read.
    """
    damaged: CheckpointError | None = None
    older: set[str] = set()
    """Runs of which a checkpoint is not newer than `after`, nor are their earlier steps."""
    with store_errors(folder.url):
        for name, manifest in folder.manifests().items():
            if manifest.created <= after:
                older.add(_run_of(name))
            if _run_of(name) in older:
                continue
            try:
                return folder.fetch(name, into)
            except CheckpointError as error:
                logger.warning("%s/%s is damaged and is skipped: %s", folder.url, name, error)
                damaged = damaged or error
                shutil.rmtree(into, ignore_errors=True)  # with the files of its run, which may be another one
    if damaged is not None:
        raise damaged
    return None


def _run_of(name: str) -> str:
    """Path of the run of a checkpoint, below the same folder."""
    return name.rpartition("/")[0]


@contextlib.contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Raise errors of the file system at `url` as `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # of the file system's package
        raise CheckpointError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
