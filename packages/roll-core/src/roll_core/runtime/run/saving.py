"""Write a run's checkpoints one at a time. Ranks may finish writing in the background while training continues.

    save ─► every rank saves ─┬─ all files written ───────────────────────────────► digests ─► rename ─► save returns
                              └─ some pending: save returns, and a task ─► finish_save ─► digests ─► rename

The next save and the end of the run wait for the task. If the task fails, the next step does not start.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.runtime.cluster.concurrency import gather
from roll_core.runtime.records.checkpoints import Checkpoint
from roll_core.runtime.run.resuming import SavedRole, SavedRun

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from roll_core.runtime.records.best import BestCheckpoint
    from roll_core.runtime.records.checkpoints import CheckpointStore
    from roll_core.runtime.run.active_run import ActiveRun
    from roll_core.runtime.run.roles import GroupTrainRole
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.pipeline import Pipeline

log = logging.getLogger(__name__)


class RunSaver:
    """Owns the checkpoint in progress. Enter it before the first step; its exit waits for the last checkpoint."""

    def __init__(
        self,
        run: ActiveRun,
        pipeline: Pipeline[Any],
        store: CheckpointStore,
        completed: Callable[[Checkpoint, BestCheckpoint | None], None],
        best: BestCheckpoint | None = None,
    ) -> None:
        """`completed` is called with each complete checkpoint and the best one so far. `best`: that of the resumed
        run."""
        self._run, self._pipeline, self._store, self._completed = run, pipeline, store, completed
        self._finishing: asyncio.Task[None] | None = None
        self.best = best
        """The best checkpoint by `save_best`; None if there is none. It may be in progress."""

    async def save(self, *, evaluation_due: bool = False, best: BestCheckpoint | None = None) -> None:
        """Write a checkpoint of the run after `run.step` steps. Ranks may leave files for a background task.

        `best`: set if this checkpoint is the best so far. Waits for the previous checkpoint first. Raises
        `CheckpointError` and any rank's error, including those of the previous checkpoint.
        """
        with self._run.stage("checkpoint"):
            await self._wait()
            if best is not None:
                self.best, self._store.best = best, best.step
            await self._save(evaluation_due)

    async def finish(self) -> None:
        """Wait until the last checkpoint is complete. Raises the same errors as `save`."""
        if self._finishing is not None:
            with self._run.stage("checkpoint"):
                await self._wait()

    def check(self) -> None:
        """Raise the error of the last checkpoint if its background task has failed. Does not block."""
        if self._finishing is not None and self._finishing.done():
            finished, self._finishing = self._finishing, None
            finished.result()

    async def _save(self, evaluation_due: bool) -> None:
        run, portable = self._run, self._run.config.portable_checkpoints
        trained = {name: role for name, role in run.train_roles.items() if role.trains}
        saved = SavedRun(
            pipeline=run.config.pipeline,
            pipeline_state=dict(self._pipeline.state()),
            roles={
                name: SavedRole(
                    strategy=role.config.strategy_args.strategy_name if role.config.strategy_args else "",
                    world_size=role.group.world_size,
                    weight_version=role.weight_version,
                    portable=portable,
                    model=_with_absolute_paths(role.group.spec.args["model"]),
                    strategy_config=role.group.spec.args["strategy_config"],
                )
                for name, role in trained.items()
            },
            evaluation_due=evaluation_due,
            best=asdict(self.best) if self.best is not None else None,
        )
        async with AsyncExitStack() as writing:
            path = await writing.enter_async_context(self._writing(run.step, asdict(saved)))
            unfinished = []
            for name, role in trained.items():
                if await role.save(path / name, portable=portable):
                    unfinished.append(role)
            if unfinished:
                self._finishing = asyncio.create_task(_finish(unfinished, writing.pop_all()))

    @asynccontextmanager
    async def _writing(self, step: int, state: Mapping[str, Any]) -> AsyncIterator[Path]:
        async with self._store.writing_aside(step, state) as path:
            yield path
        self._completed(Checkpoint(step, self._store.path(step)), self.best)

    async def _wait(self) -> None:
        """Wait for the background task. Cancelling this call cancels the task too."""
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            await finishing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the pending checkpoint, also after an `Exception`. Cancelling the run cancels the checkpoint."""
        if error is None:
            await self.finish()
        elif self._finishing is not None:
            if not isinstance(error, Exception):
                self._finishing.cancel()
            (failure,) = await asyncio.gather(self._finishing, return_exceptions=True)
            if failure is not None:
                log.warning("the last checkpoint is incomplete: %s", failure or "the run was stopped")


async def _finish(roles: Sequence[GroupTrainRole], writing: AsyncExitStack) -> None:
    """Finish saving on every role. The exit of `writing` completes the checkpoint, or removes it if a rank fails."""
    async with writing:
        await gather([role.finish_save() for role in roles])


def _with_absolute_paths(model: ModelSpec) -> dict[str, Any]:
    """The model with absolute paths, valid in any working directory and after `latest` moves to a new run."""
    paths = {"path": model.path, "tokenizer": model.tokenizer}
    return asdict(model) | {
        key: str(Path(path).resolve()) for key, path in paths.items() if path and Path(path).is_dir()
    }
