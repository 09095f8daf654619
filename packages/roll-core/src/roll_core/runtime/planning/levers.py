"""The smallest change of a config that makes it fit: fewest levers first, then the least painful ones.

The levers are declared: a microbatch's size, recomputation, and what each strategy offers (`MemoryAnswer.levers`). Each
is tried by asking the formulas again, so what is proposed is what `roll-core plan` would then find to fit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.errors import RollError
from roll_core.runtime.planning.plan import Plan, plan_with
from roll_core.spec.providers import TrainProvider

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from roll_core.plugins.registry import Registry
    from roll_core.runtime.planning.predicting import RoleMemory
    from roll_core.spec.config import RunConfig, WorkerConfig

MOST_LEVERS = 3
"""Of different kinds, in one proposal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting of one lever."""

    kind: str
    """Changes of one kind exclude each other."""
    keys: Mapping[str, Any]
    """Dotted keys of the config."""
    costs: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What to change, and what comes of it."""

    changes: tuple[Change, ...]
    over: int
    """Bytes that are still lacking: 0 where it fits."""

    @property
    def overrides(self) -> list[str]:
        """As arguments of the command line."""
        return [f"{key}={_written(each)}" for change in self.changes for key, each in change.keys.items()]


def smallest_change(config: RunConfig, registry: Registry, plan: Plan) -> Proposal | None:
    """What makes a plan fit that does not; where nothing does, what comes nearest. None where nothing can be moved."""
    changes = _changes(config, registry, plan)
    kinds = [list(each) for _, each in itertools.groupby(changes, key=lambda change: change.kind)]
    nearest: Proposal | None = None
    for count in range(1, min(MOST_LEVERS, len(kinds)) + 1):
        for chosen in itertools.combinations(kinds, count):
            # Together they do most at their strongest: where that does not fit, weaker settings need not be tried.
            strongest = _tried(config, registry, plan, [each[-1] for each in chosen])
            if strongest is None:
                continue
            if strongest.over:
                if nearest is None or strongest.over < nearest.over:
                    nearest = strongest
                continue
            settings = itertools.product(*chosen)
            tries = (_tried(config, registry, plan, each) for each in settings)
            return next((each for each in tries if each is not None and not each.over), strongest)
    if len(kinds) > MOST_LEVERS:
        everything = _tried(config, registry, plan, [each[-1] for each in kinds])
        if everything is not None and (nearest is None or everything.over < nearest.over):
            return everything
    return nearest if nearest is not None and nearest.over < plan.over else None


def _tried(config: RunConfig, registry: Registry, plan: Plan, changes: Sequence[Change]) -> Proposal | None:
    keys = {key: value for change in changes for key, value in change.keys.items()}
    try:
        found = plan_with(changed(config, keys), registry, plan.placing, plan.capacity)
    except (RollError, ValueError):  # settings that exclude each other are no proposal
        return None
    return Proposal(changes=tuple(changes), over=found.over)


def _changes(config: RunConfig, registry: Registry, plan: Plan) -> Iterator[Change]:
    """Those of roles that have a part in what does not fit, changes of one kind side by side and weakest first."""
    guilty = {name for load in plan.loads if load.over for name, _ in load.by_role}
    for role in plan.memory:
        if role.role not in guilty or role.unknown:
            continue
        worker = config.roles()[role.role]
        if role.kind == "train":
            yield from _smaller_micro_batches(role.role, worker)
            name = worker.strategy_args.strategy_name if worker.strategy_args is not None else role.strategy
            recomputes = registry.find(TrainProvider, name).capabilities.gradient_checkpointing
            if recomputes and worker.model_args.disable_gradient_checkpointing:
                yield Change(
                    kind=f"{role.role} recomputation",
                    keys={f"{role.role}.model_args.disable_gradient_checkpointing": False},
                    costs="activations are computed twice: about a third more time in training",
                )
        if role.kind in ("train", "score"):
            yield from _smaller_scoring(role, worker)
        yield from _of_strategy(role)


def _smaller_micro_batches(name: str, worker: WorkerConfig) -> Iterator[Change]:
    args = worker.training_args
    costs = "smaller products use the hardware less well; the numbers stay the same"
    if worker.use_dynamic_batching_in_train and worker.max_tokens_per_microbatch_in_train:
        for tokens in _halves(worker.max_tokens_per_microbatch_in_train):
            keys = {f"{name}.max_tokens_per_microbatch_in_train": tokens}
            yield Change(kind=f"{name} microbatch", keys=keys, costs=costs)
        return
    for size in _halves(args.per_device_train_batch_size):
        times = args.per_device_train_batch_size // size
        if size * times != args.per_device_train_batch_size:
            continue
        keys = {
            f"{name}.training_args.per_device_train_batch_size": size,
            f"{name}.training_args.gradient_accumulation_steps": args.gradient_accumulation_steps * times,
        }
        yield Change(kind=f"{name} microbatch", keys=keys, costs=costs)


def _smaller_scoring(role: RoleMemory, worker: WorkerConfig) -> Iterator[Change]:
    if worker.use_dynamic_batching_in_infer and worker.max_tokens_per_microbatch_in_infer:
        key, value = "max_tokens_per_microbatch_in_infer", worker.max_tokens_per_microbatch_in_infer
    else:
        key, value = "infer_batch_size", worker.infer_batch_size
    for each in _halves(value):
        keys = {f"{role.role}.{key}": each}
        yield Change(kind=f"{role.role} scoring", keys=keys, costs="scoring takes more and smaller passes")


def _of_strategy(role: RoleMemory) -> Iterator[Change]:
    """Levers that set the same keys are settings of one."""
    ordered: dict[tuple[str, ...], list[Change]] = {}
    for lever in role.levers:
        kind = f"{role.role} {' '.join(sorted(lever.keys))}"
        keys = {f"{role.role}.strategy_args.strategy_config.{key}": value for key, value in lever.keys.items()}
        ordered.setdefault(tuple(sorted(lever.keys)), []).append(Change(kind=kind, keys=keys, costs=lever.costs))
    for each in ordered.values():
        yield from each


def _halves(value: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value


def changed(config: RunConfig, keys: Mapping[str, Any]) -> RunConfig:
    """A config with other values for dotted keys. What the schemas of strategies say is asked when they are used."""
    for key, value in keys.items():
        config = _with(config, key.split("."), value)
    return config


def _with(place: Any, path: Sequence[str], value: Any) -> Any:
    first, *rest = path
    if isinstance(place, dict):
        inner = place.get(first, {}) if rest else None
        return {**place, first: _with(inner, rest, value) if rest else value}
    new = _with(getattr(place, first), rest, value) if rest else value
    return place.model_copy(update={first: new})


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def explained(changes: Iterable[Change]) -> list[str]:
    """What each costs, once."""
    return list(dict.fromkeys(change.costs for change in changes))
