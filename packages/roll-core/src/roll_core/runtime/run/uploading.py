"""Copies a run's complete checkpoints to its `checkpoint_store` while training continues.

    RunSaver ─► completed ─► submit ─► a task ─► a thread: files, then the manifest ─► retention in the store

Steps do not wait for it. The end of the run waits until nothing is pending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from roll_core.errors import CheckpointError, one_line
from roll_core.runtime.cluster.concurrency import cancel_all, in_daemon_thread

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from roll_core.runtime.records.checkpoints import BestCheckpoint, Checkpoint, CheckpointStore
    from roll_core.runtime.records.remote_checkpoints import RemoteFolder

logger = logging.getLogger(__name__)

RETRY_S = (1.0, 5.0)
"""Pauses in seconds before an upload is tried again."""


class CheckpointUploader:
    """Copies the checkpoints of one run in the background, one at a time. Lives on the run's event loop.

    A failed upload is a warning, and an error of the next step if `required`. Local checkpoints stay until their
    upload has ended.
    """

    def __init__(self, folder: RemoteFolder, local: CheckpointStore, run: Path, *, required: bool) -> None:
        """`folder` is that of this run alone. `local` retains the checkpoints that wait for their upload."""
        self._folder, self._local, self._run, self._required = folder, local, run, required
        self._pending: list[Checkpoint] = []
        self._uploaded: list[int] = []
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
        for skipped in [each for each in self._pending if each.step != self._best]:
            logger.warning("step %d is not uploaded: step %d is newer", skipped.step, checkpoint.step)
            self._pending.remove(skipped)
            self._local.pinned.discard(skipped.step)
        self._pending.append(checkpoint)
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
        self._uploaded.append(checkpoint.step)
        await in_daemon_thread(self._retire, name="roll-upload")

    def _copy(self, checkpoint: Checkpoint) -> None:
        self._folder.put_run(self._run, self._stop)
        self._folder.put_checkpoint(checkpoint.path, self._stop)

    def _retire(self) -> None:
        """Remove the oldest copies beyond `max_ckpt_to_keep`, except the best one.

        A failed removal is a warning, and is repeated after the next upload.
        """
        for step in self._uploaded[: -self._local.keep] if self._local.keep else ():
            if step == self._best:
                continue
            try:
                self._folder.remove(f"step-{step}")
            except Exception as error:  # of the file system's package
                logger.warning("%s/step-%d could not be removed: %s", self._folder.url, step, one_line(error))
            else:
                self._uploaded.remove(step)

    def _failed(self, what: str, error: Exception) -> None:
        message = f"{what} not copied to {self._folder.url}: {one_line(error)}"
        logger.warning("checkpoint_store: %s; local checkpoints are complete", message)
        self._error = CheckpointError(f"checkpoint_store: {message}")
        self._error.__cause__ = error
        self._failures += 1
        self._metrics["checkpoint_store/failures"] = float(self._failures)
