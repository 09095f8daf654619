"""The plan of a config: where its workers run, what memory they take, and whether the run would start and fit.

Uses the same `place_roles`, `executor_of` and memory formulas as a run, with the roles of the pipeline's plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.api import overrides_located
from roll_core.config import load
from roll_core.config.parts import on_a_cluster
from roll_core.errors import PlacementError, RollError
from roll_core.host import free_memory_bytes
from roll_core.plugins.registry import load_registry
from roll_core.runtime.cluster.executors import executor_of
from roll_core.runtime.cluster.placement import check_local, no_such_slot, place_roles, slots_of, slots_per_node
from roll_core.runtime.cluster.platform import select_platform
from roll_core.runtime.planning.placement import Placement, pipeline_plan, weight_choices
from roll_core.runtime.planning.plan import Capacity, plan_with
from roll_core.runtime.workers.build import role_config, separate_processes_reason, slots_per_worker
from roll_tools.suggestion import smallest_change

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.config import LoadedConfig
    from roll_core.config.loading import ConfigSource
    from roll_core.config.overrides import Overrides
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.cluster.placement import Place
    from roll_core.runtime.planning.plan import Plan
    from roll_core.spec.platform import Platform
    from roll_core.spec.providers import ExecutorProvider
    from roll_tools.suggestion import Proposal

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A config with its plan, and the smallest change that makes it fit in memory."""

    loaded: LoadedConfig
    plan: Plan
    proposal: Proposal | None
    """None if the plan fits or no change helps."""

    @property
    def fits(self) -> bool:
        """True if every worker has a place and no known memory is exceeded."""
        return self.plan.starts and not self.plan.over


def plan(
    config: ConfigSource,
    overrides: Overrides = (),
    *,
    nodes: int | None = None,
    slot_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    disabled_plugins: Sequence[str] = (),
) -> PlannedRun:
    """Compute placement and memory of each role, without starting a run. The first two arguments are those of `run`.

    `nodes` and the free memory of a slot and of a host, in GiB, replace what is detected here. Raises `ConfigError`
    with all mistakes, and `PlacementError` if no placement can be computed.
    """
    registry = load_registry(disabled_plugins)
    with overrides_located():
        loaded = load(config, overrides, registry)
    slot, host = (None if each is None else int(each * GIB) for each in (slot_memory_gib, host_memory_gib))
    found = make_plan(loaded, registry, num_nodes=nodes, slot_bytes=slot, host_bytes=host)
    proposal = smallest_change(loaded.config, registry, found) if found.over else None
    return PlannedRun(loaded=loaded, plan=found, proposal=proposal)


def make_plan(
    loaded: LoadedConfig,
    registry: Registry,
    *,
    num_nodes: int | None = None,
    slot_bytes: int | None = None,
    host_bytes: int | None = None,
) -> Plan:
    """Make the plan of a config.

    `num_nodes`, `slot_bytes` and `host_bytes` describe the machines and override what is detected on this host.
    Raises `PlacementError` if no placement can be computed.
    """
    placement = place(loaded, registry, num_nodes=num_nodes)
    if host_bytes is None and placement.here:
        host_bytes = free_memory_bytes()
    if placement.platform.slots_share_cores:
        slot_bytes = None
    elif slot_bytes is None and placement.here:
        slot_bytes = _free_on_slots(placement.platform)
    return plan_with(loaded.config, registry, placement, Capacity(host=host_bytes, slot=slot_bytes))


def _free_on_slots(platform: Platform) -> int | None:
    """Free bytes of the slot with the least free memory; None if unknown."""
    try:
        slots = [platform.memory(index) for index in range(platform.device_count())]
    except RollError:
        return None
    return min((slot["total"] - slot["used"] for slot in slots), default=None)


def place(loaded: LoadedConfig, registry: Registry, *, num_nodes: int | None = None) -> Placement:
    """Place the workers of a config. `num_nodes` is the number of nodes, if the user gives it.

    Most problems are returned in `Placement.problems`. Raises `PlacementError` if no placement can be computed at all.
    """
    config = loaded.config
    pipeline = pipeline_plan(loaded.pipeline, config)
    problems: list[str] = []
    clustered = on_a_cluster(registry, config.executor)
    try:
        platform = select_platform(registry, config.platform, elsewhere=clustered)
        here = not clustered
    except PlacementError as error:
        if config.platform is None:
            raise
        platform, here = select_platform(registry, config.platform, elsewhere=True), False
        if num_nodes is None:
            problems.append(str(error))
    per_node = slots_per_node(platform, config.num_gpus_per_node)
    workers = {role.name: role_config(config, role.name) for role in pipeline.roles}
    places = place_roles(
        workers,
        platform,
        num_gpus_per_node=config.num_gpus_per_node,
        slots_per_worker=slots_per_worker(pipeline.roles, config, registry),
        configured=config.roles(),
    )
    apart = separate_processes_reason(pipeline.roles, config, registry)
    executor = executor_of(config, registry, places, apart)
    if num_nodes is None and not clustered and here:
        num_nodes = 1
    if executor.in_process:
        for role, each in places.items() if here else ():
            try:
                check_local(role, workers[role].kind, each, platform, per_node)
            except RollError as error:
                problems.append(str(error))
        problems += [f"{apart}: executor {executor.name} has only one process"] if apart else ()
    elif num_nodes is not None:
        problems += _missing(places, platform, per_node, num_nodes)
        if here and num_nodes == 1:
            problems += _not_on_this_host(places, platform, per_node)
    try:
        weights = weight_choices(pipeline.roles, config, registry, platform, executor, places)
    except RollError as error:
        weights = {}
        problems += [] if apart else [str(error)]
    return Placement(
        pipeline=pipeline,
        platform=platform,
        per_node=per_node,
        num_nodes=num_nodes,
        executor=executor,
        places=places,
        weights=weights,
        problems=tuple(problems),
        notes=_waiting(executor, places, platform, num_nodes) if executor.placement_timeout_s and not problems else (),
        here=here,
    )


def _missing(places: Mapping[str, tuple[Place, ...]], platform: Platform, per_node: int, num_nodes: int) -> list[str]:
    """One problem per role with slots beyond the last node: its first missing slot and number of unplaced workers."""
    found = []
    for role, workers in places.items():
        unplaced = [each for each in workers if each.node >= num_nodes and each.slots]
        if unplaced:
            slot = next(slot for slot in unplaced[0].slots if slot >= num_nodes * per_node)
            count = f"{len(unplaced)} of {len(workers)} workers of {role} cannot be placed"
            found.append(f"{count}: {no_such_slot(role, slot, platform, per_node, num_nodes)}")
    return found


def _not_on_this_host(places: Mapping[str, tuple[Place, ...]], platform: Platform, per_node: int) -> list[str]:
    """One problem per role with slots beyond this host's devices: `num_gpus_per_node` may exceed the device count."""
    here = per_node if platform.slots_share_cores else platform.device_count()
    missing = {role: [slot for slot in slots_of(each) if here <= slot < per_node] for role, each in places.items()}
    return [
        f"{role} needs slot {min(slots)}, but this host has {here} slots of platform {platform.name}"
        f" (num_gpus_per_node is {per_node})"
        for role, slots in missing.items()
        if slots
    ]


def _waiting(
    executor: ExecutorProvider, places: Mapping[str, tuple[Place, ...]], platform: Platform, num_nodes: int | None
) -> tuple[str, ...]:
    """A note about slots for which the run may wait: the executor reserves all slots of a run together."""
    highest: dict[int, int] = {}
    for workers in places.values():
        for each in workers:
            if each.slots:
                highest[each.node] = max(highest.get(each.node, 0), max(each.local_indices) + 1)
    if not highest or platform.slots_share_cores:
        return ()
    wanted = ", ".join(f"{highest[node]}" for node in sorted(highest))
    nodes = f"{len(highest)} nodes" if len(highest) > 1 else "one node"
    unknown = "" if num_nodes is not None else " (the number of nodes of the cluster is unknown: give --nodes N)"
    return (
        f"Executor {executor.name} reserves {platform.resource_name} {wanted} on {nodes} together before any role"
        f" starts{unknown}. If other jobs occupy these slots, the run waits for at most"
        f" {executor.placement_timeout_s} s. Then it ends and names the missing slots",
    )
