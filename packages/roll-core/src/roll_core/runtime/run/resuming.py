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
    from roll_core.runtime.run.roles import GroupTrainRole
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
    """True if the checkpoint also contains the state that all strategies read (`records.portable_state`)."""
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
    """True if SIGTERM interrupted the evaluation of this step. The resuming run evaluates before its first step."""

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
            )
            _check_types(saved, dict)
            for name, role in saved.roles.items():
                _check_types(role, dict, type(None))
                if not is_inside(name) or "/" in name:
                    raise TypeError(f"{name!r:.100} is no name of a role")
            return saved
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{checkpoint.path}: its state is not that of a run: {error!r}") from error


def _check_types(record: SavedRun | SavedRole, *others: type) -> None:
    """Raise `TypeError` unless `str`, `int` and `bool` fields match their annotations and the rest are of `others`."""
    known = {"str": (str,), "int": (int,), "bool": (bool,)}
    for each in fields(record):
        value = getattr(record, each.name)
        if type(value) not in known.get(str(each.type), others):
            raise TypeError(f"{each.name} is {value!r:.100}")


def check_fits(checkpoint: Checkpoint, config: RunConfig, registry: Registry) -> None:
    """Raise `CheckpointMismatchError` if a config cannot resume from a checkpoint. Runs before any worker starts.

    Does not compare the number of processes: without portable state, the strategy itself checks it when it loads.
    """
    saved = SavedRun.of(checkpoint)
    if saved.pipeline != config.pipeline:
        raise CheckpointMismatchError(
            f"{checkpoint.path} is of the pipeline {saved.pipeline}, this config's is {config.pipeline}; to start from"
            " that model, give its export as model_name_or_path"
        )
    roles = config.roles()
    for name, role in saved.roles.items():
        worker = roles.get(name)
        if worker is None or worker.strategy_args is None:
            raise CheckpointMismatchError(f"{checkpoint.path} holds {name}, which this config does not have")
        asked = worker.strategy_args.strategy_name
        if asked == role.strategy:
            continue
        holds = f"{checkpoint.path} holds {name} in the format of {role.strategy}, which {asked} does not read"
        if not registry.find(TrainProvider, asked).capabilities.portable_state:
            raise CheckpointMismatchError(
                f"{holds}, nor does it read the state of other strategies: set {name}.strategy_args.strategy_name to"
                f" {role.strategy}, or leave resume_from_checkpoint out and start from an export of that run"
            )
        if not role.portable:
            raise CheckpointMismatchError(
                f"{holds}, and no portable state: go on with {name}.strategy_args.strategy_name={role.strategy} and"
                " portable_checkpoints=true, and change the strategy at the next checkpoint, which will have one; or"
                " leave resume_from_checkpoint out and start from an export of that run"
            )


async def load_run(run: ActiveRun, pipeline: Pipeline[Any], checkpoint: Checkpoint, registry: Registry) -> SavedRun:
    """Load roles, pipeline state and `run.step` from a checkpoint and return its run state.

    Raises `CheckpointMismatchError` if the checkpoint lacks a role that this run trains.
    """
    saved = SavedRun.of(checkpoint)
    trained = {name for name, role in run.train_roles.items() if role.trains}
    if missing := trained - saved.roles.keys():
        raise CheckpointMismatchError(f"{checkpoint.path} does not hold {', '.join(sorted(missing))}, which is trained")
    for name, role in saved.roles.items():
        here = run.train_role(name)
        load = here.load_portable if _needs_portable(role, here, registry) else here.load
        await load(checkpoint.path / name, role.weight_version)
    pipeline.load_state(saved.pipeline_state)
    run.step = checkpoint.step
    log.info("resumed from %s at step %d", checkpoint.path, checkpoint.step)
    return saved


def _needs_portable(saved: SavedRole, here: GroupTrainRole, registry: Registry) -> bool:
    """True if a role loads the portable state instead of its strategy's files.

    That is the case if the files are of another strategy, or of a world size that the strategy cannot load.
    """
    name = here.config.strategy_args.strategy_name if here.config.strategy_args else ""
    can = registry.find(TrainProvider, name).capabilities
    if name == saved.strategy and (saved.world_size == here.group.world_size or can.any_world_size):
        return False
    if not (saved.portable and can.portable_state):
        return False
    log.info("%s: %s × %d goes on from the state of %s", here.name, name, here.group.world_size, saved)
    return True
