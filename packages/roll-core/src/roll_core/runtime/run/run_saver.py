"""Checkpoints of a run: written one at a time, also in the background, and loaded by a run that resumes.

    save ─► every rank saves ─┬─ all files written ───────────────────────────────► digests ─► rename ─► save returns
                              └─ some pending: save returns, and a task ─► finish_save ─► digests ─► rename

The next save and the end of the run wait for the task. If the task fails, the next step does not start. `state.json`
has the run's state (`SavedRun`), beside the files of the strategies.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import CheckpointError, CheckpointMismatchError, ContractError
from roll_core.runtime.records.checkpoint_directory import STATE, Checkpoint
from roll_core.runtime.records.manifest import is_inside
from roll_core.spec.providers import PipelineProvider, TrainProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from roll_core.plugins.registry import Registry
    from roll_core.runtime.records.checkpoint_directory import BestCheckpoint, CheckpointDirectory
    from roll_core.runtime.run.active_run import ActiveRun
    from roll_core.runtime.run.identity import RunIdentity
    from roll_core.runtime.run.roles import GroupTrainRole
    from roll_core.spec.config import RunConfig
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.pipeline import Pipeline

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRole:
    """A trained role in a checkpoint."""

    strategy: str
    """Name of the strategy in whose format the files are."""
    world_size: int
    weight_version: int
    portable: bool = False
    """True if the checkpoint also contains the state that all strategies read (`roll_modeling.portable_files`)."""
    model: Mapping[str, Any] | None = None
    """The `ModelSpec` as a mapping. With `strategy_config`, it suffices to build the role without its run."""
    strategy_config: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.strategy} × {self.world_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """Contents of `state.json` in a checkpoint."""

    pipeline: str
    pipeline_state: Mapping[str, Any]
    roles: Mapping[str, SavedRole]
    evaluation_due: bool = False
    """True if a signal interrupted the evaluation of this step. The resuming run evaluates before its first step."""
    identity: Mapping[str, Any] | None = None
    """Models, tokenizer and data of the run: a `RunIdentity` as a mapping."""
    best: Mapping[str, Any] | None = None
    """The best checkpoint up to this step, which may be this one: a `BestCheckpoint` as a mapping."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Read the state of a checkpoint. Raises `CheckpointError` if it cannot be read or is no state of a run."""
        try:
            state = json.loads((checkpoint.path / STATE).read_text(encoding="utf-8"))
            saved = cls(
                pipeline=state["pipeline"],
                pipeline_state=state["pipeline_state"],
                roles={name: SavedRole(**role) for name, role in state["roles"].items()},
                evaluation_due=state.get("evaluation_due", False),
                identity=state.get("identity"),
                best=state.get("best"),
            )
            records: list[SavedRun | SavedRole] = [saved, *saved.roles.values()]
            for record in records:
                for field in fields(record):
                    value, known = getattr(record, field.name), {"str": str, "int": int, "bool": bool}
                    expected = known.get(str(field.type), dict)
                    if type(value) is not expected and not (value is None and field.default is None):
                        raise TypeError(f"{field.name} is {value!r:.100}")
            for name in saved.roles:
                if not is_inside(name) or "/" in name:
                    raise TypeError(f"{name!r:.100} is not a name of a role")
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{checkpoint.path}: state.json is not the state of a run: {error!r}") from error
        return saved


def check_fits(checkpoint: Checkpoint, config: RunConfig, registry: Registry) -> None:
    """Raise `CheckpointMismatchError` if a config cannot resume from a checkpoint. Runs before any worker starts.

    Does not compare the number of processes: without portable state, the strategy itself checks it when it loads.
    """
    saved = SavedRun.of(checkpoint)
    if saved.pipeline != config.pipeline:
        raise CheckpointMismatchError(
            f"{checkpoint.path} is a checkpoint of pipeline {saved.pipeline}, but the config has pipeline"
            f" {config.pipeline}; to start from that model, set model_name_or_path to its export"
        )
    roles = config.roles()
    for name, role in saved.roles.items():
        worker = roles.get(name)
        if worker is None or worker.strategy_args is None:
            raise CheckpointMismatchError(f"{checkpoint.path} contains role {name}, which this config does not train")
        asked = worker.strategy_args.strategy_name
        if asked == role.strategy:
            continue
        other = f"{checkpoint.path} contains {name} in the format of {role.strategy}, which {asked} cannot load"
        if not registry.find(TrainProvider, asked).capabilities.portable_state:
            raise CheckpointMismatchError(
                f"{other}, and {asked} does not support portable states: set {name}.strategy_args.strategy_name to"
                f" {role.strategy}, or remove resume_from_checkpoint and start from an export of that run"
            )
        if not role.portable:
            raise CheckpointMismatchError(
                f"{other}, and it has no portable state: resume with {name}.strategy_args.strategy_name={role.strategy}"
                " and portable_checkpoints=true, and change the strategy after the next checkpoint; or remove"
                " resume_from_checkpoint and start from an export of that run"
            )


async def load_run(run: ActiveRun, pipeline: Pipeline[Any], checkpoint: Checkpoint) -> SavedRun:
    """Load roles, pipeline state and `run.step` from a checkpoint and return its run state.

    A role loads the portable state if its strategy's own files are of another strategy, or of a world size that the
    strategy cannot load. Raises `CheckpointMismatchError` if the checkpoint lacks a role that this run trains.
    """
    saved = SavedRun.of(checkpoint)
    trained = {name for name, role in run.train_roles.items() if role.trains}
    if missing := trained - saved.roles.keys():
        raise CheckpointMismatchError(f"{checkpoint.path} lacks {', '.join(sorted(missing))}, which this run trains")
    for name, state in saved.roles.items():
        role = run.train_role(name)
        strategy = role.config.strategy_args.strategy_name if role.config.strategy_args else ""
        can, world_size = role.capabilities, role.group.world_size
        same_layout = strategy == state.strategy and (state.world_size == world_size or can.any_world_size)
        portable = not same_layout and state.portable and can.portable_state
        if portable:
            log.info("%s: %s × %d loads the portable state of %s", name, strategy, world_size, state)
        await role.load(checkpoint.path / name, state.weight_version, portable=portable)
    pipeline.load_state(saved.pipeline_state)
    run.step = checkpoint.step
    log.info("resumed from %s at step %d", checkpoint, checkpoint.step)
    return saved


class RunSaver:
    """Owns the checkpoint in progress. Enter it before the first step; its exit waits for the last checkpoint."""

    def __init__(
        self,
        run: ActiveRun,
        pipeline: Pipeline[Any],
        directory: CheckpointDirectory,
        completed: Callable[[Checkpoint, BestCheckpoint | None], None],
        best: BestCheckpoint | None = None,
        identity: RunIdentity | None = None,
    ) -> None:
        """`completed` is called with each complete checkpoint and the best one so far. `best`: that of the resumed
        run."""
        self._run, self._pipeline, self._directory, self._completed = run, pipeline, directory, completed
        self._identity = identity
        self._finishing: asyncio.Task[None] | None = None
        if best is not None:
            directory.best = best.step
        self.best = best
        """The best checkpoint by `save_best`; None if there is none. It may be in progress."""

    async def save(self, *, evaluation_due: bool = False, best: BestCheckpoint | None = None) -> None:
        """Write a checkpoint of the run after `run.step` steps. Ranks may leave files for a background task.

        `best`: set if this checkpoint is the best so far. Waits for the previous checkpoint first. Raises
        `CheckpointError` and any rank's error, including those of the previous checkpoint.
        """
        with self._run.stage("checkpoint"):
            # One checkpoint at a time: a rank has a single pending state.
            await self._wait()
            if best is not None:
                self.best, self._directory.best = best, best.step
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
            identity=None if self._identity is None else self._identity.at_step(run.step),
            best=asdict(self.best) if self.best is not None else None,
        )
        async with AsyncExitStack() as writing:
            try:
                path = await writing.enter_async_context(self._directory.writing_aside(run.step, asdict(saved)))
            except (TypeError, ValueError) as error:  # of JSON
                owner = run.registry.owner(run.registry.find(PipelineProvider, run.config.pipeline))
                raise ContractError(f"{owner}: state() has values that are not plain JSON: {error}") from error
            unfinished = [role for name, role in trained.items() if await role.save(path / name, portable=portable)]
            # The stack goes to the task: from here the task completes or removes the checkpoint.
            self._finishing = asyncio.create_task(self._finish(run.step, unfinished, writing.pop_all()))
        if not unfinished:
            await self._wait()

    async def _finish(self, step: int, roles: Sequence[GroupTrainRole], writing: AsyncExitStack) -> None:
        """Finish saving on the roles that left files, then complete the checkpoint.

        The exit of `writing` completes it, or removes it if a rank fails.
        """
        from roll_core.runtime.cluster.concurrency import gather

        async with writing:
            await gather([role.finish_save() for role in roles])
        self._completed(Checkpoint(step, self._directory.path(step)), self.best)

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


def _with_absolute_paths(model: ModelSpec) -> dict[str, Any]:
    """The model with absolute paths, valid in any working directory and after `latest` moves to a new run."""
    paths = {"path": model.path, "tokenizer": model.tokenizer}
    return asdict(model) | {
        key: str(Path(path).resolve()) for key, path in paths.items() if path and Path(path).is_dir()
    }
