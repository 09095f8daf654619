"""Run state in a checkpoint, beside the strategies' files, and the check that a config can resume from it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from roll_core.errors import CheckpointError, CheckpointMismatchError
from roll_core.runtime.records.manifest import is_inside
from roll_core.spec.providers import TrainProvider

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from roll_core.plugins.registry import Registry
    from roll_core.runtime.records.checkpoints import Checkpoint
    from roll_core.runtime.run.active_run import ActiveRun
    from roll_core.spec.config import RunConfig
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
    best: Mapping[str, Any] | None = None
    """The best checkpoint up to this step, which may be this one: a `BestCheckpoint` as a mapping."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Read the state of a checkpoint. Raises `CheckpointError` if it cannot be read or is no state of a run."""
        state = checkpoint.state()
        try:
            saved = cls(
                pipeline=state["pipeline"],
                pipeline_state=state["pipeline_state"],
                roles={name: SavedRole(**role) for name, role in state["roles"].items()},
                evaluation_due=state.get("evaluation_due", False),
                best=state.get("best"),
            )
            records: list[SavedRun | SavedRole] = [saved, *saved.roles.values()]
            for record in records:
                for each in fields(record):
                    value, known = getattr(record, each.name), {"str": str, "int": int, "bool": bool}
                    expected = known.get(str(each.type), dict)
                    if type(value) is not expected and not (each.name in ("model", "best") and value is None):
                        raise TypeError(f"{each.name} is {value!r:.100}")
            for name in saved.roles:
                if not is_inside(name) or "/" in name:
                    raise TypeError(f"{name!r:.100} is not a name of a role")
        except (KeyError, TypeError, AttributeError) as error:
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
        own = strategy == state.strategy and (state.world_size == world_size or can.any_world_size)
        portable = not own and state.portable and can.portable_state
        if portable:
            log.info("%s: %s × %d loads the portable state of %s", name, strategy, world_size, state)
        await role.load(checkpoint.path / name, state.weight_version, portable=portable)
    pipeline.load_state(saved.pipeline_state)
    run.step = checkpoint.step
    log.info("resumed from %s at step %d", checkpoint, checkpoint.step)
    return saved
