"""Search for the smallest config change that makes a run fit into memory: fewest settings first, then lowest cost.

Candidates are microbatch sizes, gradient checkpointing, and the `MemoryEstimate.savings` of each strategy. Each
candidate is evaluated with the memory formulas, so `roll-core plan` accepts the proposed config.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.errors import RollError
from roll_core.spec.providers import TrainProvider
from roll_tools.run_plan import Plan, plan_with

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from roll_core.plugins.registry import Registry
    from roll_core.spec.config import RunConfig, WorkerConfig
    from roll_tools.role_memory import RoleMemory

MAX_KINDS = 3
"""Maximum number of changes of different kinds in a proposal, before all kinds are tried together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One candidate setting that reduces memory."""

    kind: str
    """Changes of one kind exclude each other."""
    keys: Mapping[str, Any]
    """Config values by dotted key."""
    costs: str
    """Drawback of the change, for users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Changes to a config, and the memory that is still missing with them."""

    changes: tuple[Change, ...]
    over: int
    """Bytes by which the plan still exceeds memory; 0 if it fits."""

    @property
    def overrides(self) -> list[str]:
        """The changes as command line arguments, `key=value`."""
        return [f"{key}={_written(value)}" for change in self.changes for key, value in change.keys.items()]


def smallest_change(config: RunConfig, registry: Registry, plan: Plan) -> Proposal | None:
    """The smallest change that makes `plan` fit, or else the one that comes closest. None if no change helps."""
    changes = _changes(config, registry, plan)
    kinds = [list(group) for _, group in itertools.groupby(changes, key=lambda change: change.kind)]
    nearest: Proposal | None = None
    for count in range(1, min(MAX_KINDS, len(kinds)) + 1):
        for chosen in itertools.combinations(kinds, count):
            # The strongest settings save most memory: if they do not fit together, skip the weaker ones.
            strongest = _tried(config, registry, plan, [options[-1] for options in chosen])
            if strongest is None:
                continue
            if strongest.over:
                if nearest is None or strongest.over < nearest.over:
                    nearest = strongest
                continue
            settings = itertools.product(*chosen)
            tries = (_tried(config, registry, plan, combination) for combination in settings)
            return next((proposal for proposal in tries if proposal is not None and not proposal.over), strongest)
    if len(kinds) > MAX_KINDS:
        everything = _tried(config, registry, plan, [options[-1] for options in kinds])
        if everything is not None and (nearest is None or everything.over < nearest.over):
            return everything
    return nearest if nearest is not None and nearest.over < plan.over else None


def _tried(config: RunConfig, registry: Registry, plan: Plan, changes: Sequence[Change]) -> Proposal | None:
    keys = {key: value for change in changes for key, value in change.keys.items()}
    try:
        new_plan = plan_with(changed(config, keys), registry, plan.placement, plan.capacity)
    except (RollError, ValueError):  # incompatible settings are no proposal
        return None
    return Proposal(changes=tuple(changes), over=new_plan.over)


def _changes(config: RunConfig, registry: Registry, plan: Plan) -> Iterator[Change]:
    """Changes to roles that contribute to an overfull memory, grouped by kind and weakest first within a kind."""
    overfull = {name for load in plan.loads if load.over for name, _ in load.by_role}
    for role in plan.memory:
        if role.role not in overfull or role.unknown:
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
    size, steps = worker.training_args.per_device_train_batch_size, worker.training_args.gradient_accumulation_steps
    if worker.use_dynamic_batching_in_train and worker.max_tokens_per_microbatch_in_train:
        halved = _halves(worker.max_tokens_per_microbatch_in_train)
        settings = [{f"{name}.max_tokens_per_microbatch_in_train": tokens} for tokens in halved]
    else:
        settings = [
            {
                f"{name}.training_args.per_device_train_batch_size": smaller,
                f"{name}.training_args.gradient_accumulation_steps": steps * (size // smaller),
            }
            for smaller in _halves(size)
            if size % smaller == 0
        ]
    costs = "smaller matrix products use the hardware less well; the numbers stay the same"
    for keys in settings:
        yield Change(kind=f"{name} microbatch", keys=keys, costs=costs)


def _smaller_scoring(role: RoleMemory, worker: WorkerConfig) -> Iterator[Change]:
    if worker.use_dynamic_batching_in_infer and worker.max_tokens_per_microbatch_in_infer:
        key, value = "max_tokens_per_microbatch_in_infer", worker.max_tokens_per_microbatch_in_infer
    else:
        key, value = "infer_batch_size", worker.infer_batch_size
    for smaller in _halves(value):
        keys = {f"{role.role}.{key}": smaller}
        yield Change(kind=f"{role.role} scoring", keys=keys, costs="scoring takes more and smaller passes")


def _of_strategy(role: RoleMemory) -> Iterator[Change]:
    """Savings that the strategy offers. Those that set the same keys are of one kind."""
    ordered: dict[str, list[Change]] = {}
    for saving in role.savings:
        kind = f"{role.role} {' '.join(sorted(saving.keys))}"
        keys = {f"{role.role}.strategy_args.strategy_config.{key}": value for key, value in saving.keys.items()}
        ordered.setdefault(kind, []).append(Change(kind=kind, keys=keys, costs=saving.costs))
    for changes in ordered.values():
        yield from changes


def _halves(value: int) -> Iterator[int]:
    return (value >> shift for shift in range(1, value.bit_length()))


def changed(config: RunConfig, keys: Mapping[str, Any]) -> RunConfig:
    """Copy a config with new values for dotted keys. Does not validate; strategy schemas are checked when used."""
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
    """Drawbacks of the changes, without duplicates."""
    return list(dict.fromkeys(change.costs for change in changes))
