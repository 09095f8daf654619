"""Placement of a run's workers, its weight transports, and the pipeline's plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roll_core.config.parts import on_a_cluster
from roll_core.config.weight_transports import TransportChoice, choose_transport
from roll_core.errors import PlacementError, PluginError, RollError
from roll_core.plugins.targets import load_target
from roll_core.runtime.cluster.executors import executor_of
from roll_core.runtime.cluster.placement import check_local, no_such_slot, place_roles, slots_of, slots_per_node
from roll_core.runtime.cluster.platform import select_platform
from roll_core.runtime.workers.build import (
    provider_of,
    role_config,
    roles_over_nodes,
    separate_processes_reason,
    slots_per_worker,
)
from roll_core.spec.pipeline import RoleSpec
from roll_core.spec.plan import UPDATE, Phase, PipelinePlan
from roll_core.spec.platform import HOST_DEVICE
from roll_core.spec.providers import RewardProvider
from roll_core.spec.transport import DeviceFacts, RoleFacts, WorkerFacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.plugins.registry import Registry
    from roll_core.runtime.cluster.placement import Place
    from roll_core.spec.config import RunConfig
    from roll_core.spec.plan import Activity
    from roll_core.spec.platform import Platform
    from roll_core.spec.providers import ExecutorProvider, PipelineProvider

HARDEST: dict[str, tuple[Activity, ...]] = {"train": UPDATE, "score": ("score",), "generate": ("generate",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Placement of every worker, and problems with it."""

    pipeline: PipelinePlan
    platform: Platform
    per_node: int
    """Number of slots per node."""
    num_nodes: int | None
    """Number of available nodes; None if it is unknown."""
    executor: ExecutorProvider
    places: Mapping[str, tuple[Place, ...]]
    weights: Mapping[tuple[str, str], TransportChoice] = field(default_factory=dict)
    """Weight transport by `(trainer, engine)`."""
    problems: tuple[str, ...] = ()
    """Reasons why the run would not start."""
    notes: tuple[str, ...] = ()
    """Resources that the run would wait for."""
    here: bool = True
    """True if the devices are on this host, so that their memory can be queried."""

    @property
    def nodes(self) -> set[int]:
        """Indices of the nodes that have workers."""
        return {part.node for workers in self.places.values() for place in workers for part in place.parts}


def place(
    config: RunConfig,
    provider: PipelineProvider,
    registry: Registry,
    *,
    num_nodes: int | None = None,
    elsewhere: bool = False,
) -> Placement:
    """Place the workers of a config. `num_nodes` is the number of nodes, if the user gives it.

    With `elsewhere`, the run is planned for other machines: they need not have this host's devices, nor this host
    theirs.

    Most problems are returned in `Placement.problems`. Raises `PlacementError` if no placement can be computed at all.
    """
    pipeline = pipeline_plan(provider, config)
    problems: list[str] = []
    clustered = on_a_cluster(registry, config.executor)
    try:
        platform = select_platform(registry, config.platform, elsewhere=clustered)
        here = not clustered
    except PlacementError as error:
        if config.platform is None:
            raise
        platform, here = select_platform(registry, config.platform, elsewhere=True), False
        if not elsewhere:
            problems.append(str(error))
    per_node = slots_per_node(platform, config.num_gpus_per_node)
    workers = {role.name: role_config(config, role.name) for role in pipeline.roles}
    places = place_roles(
        workers,
        platform,
        per_node,
        slots_per_worker=slots_per_worker(pipeline.roles, config, registry),
        configured=config.roles(),
        over_nodes=roles_over_nodes(pipeline.roles, config, registry),
    )
    apart = separate_processes_reason(pipeline.roles, config, registry)
    executor = executor_of(config, registry, places, apart)
    if num_nodes is None and not clustered and here:
        num_nodes = 1
    if executor.in_process:
        for role, role_places in places.items():
            try:
                check_local(role, workers[role].kind, role_places, platform, per_node, here=here and not elsewhere)
            except RollError as error:
                problems.append(str(error))
        problems += [f"{apart}: executor {executor.name} has only one process"] if apart else ()
    elif num_nodes is not None:
        problems += _missing(places, platform, per_node, num_nodes)
        if here and num_nodes == 1 and not elsewhere:
            problems += _not_on_this_host(places, platform, per_node)
    try:
        weights = weight_choices(pipeline.roles, config, registry, executor, places)
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


def weight_choices(
    roles: Sequence[RoleSpec],
    config: RunConfig,
    registry: Registry,
    executor: ExecutorProvider,
    places: Mapping[str, tuple[Place, ...]],
) -> dict[tuple[str, str], TransportChoice]:
    """Weight transport by `(trainer, engine)`, before any self-test.

    Raises `UnsupportedError` if no transport connects a pair.
    """
    facts = {role.name: _facts(role, config, registry, executor, places[role.name]) for role in roles}
    return {
        (role.model_from, role.name): choose_transport(
            registry, facts[role.model_from], facts[role.name], config.weight_transport
        )
        for role in roles
        if role.kind == "generate" and role.model_from in facts
    }


def _facts(
    role: RoleSpec, config: RunConfig, registry: Registry, executor: ExecutorProvider, places: Sequence[Place]
) -> RoleFacts:
    """The `RoleFacts` that the workers would report."""
    provider = provider_of(role.name, config, registry)
    if isinstance(provider, RewardProvider):
        return RoleFacts(role=role.name, workers=())
    can = provider.capabilities
    on_device = getattr(can, "device_weights", True)
    workers = tuple(
        WorkerFacts(
            host=f"node {place.node}",
            node=place.node,
            pid=0 if executor.in_process else hash((role.name, place.rank)),
            slots=place.slots,
            device=_device(place) if on_device else DeviceFacts(),
        )
        for place in places
    )
    directory = config.model_update_dir or ""
    return RoleFacts(role=role.name, workers=workers, weight_transports=can.weight_transports, directory=directory)


def _device(place: Place) -> DeviceFacts:
    """Device that the worker would report. Its first slot stands for the UUID."""
    uuid = "" if place.device == HOST_DEVICE else f"slot {place.slots[0]}"
    return DeviceFacts(device=place.device, uuid=uuid)


def pipeline_plan(provider: PipelineProvider, config: RunConfig) -> PipelinePlan:
    """The pipeline's own plan. If it declares none, assume that its roles work one after the other.

    Raises `PluginError` if the pipeline's plan function fails.
    """
    if provider.plan:
        make = load_target(provider.plan, owner=f"pipeline {provider.name}")
        try:
            plan: PipelinePlan = make(config)
        except Exception as error:  # plugin code may raise anything
            raise PluginError(
                f"pipeline {provider.name}: {provider.plan} failed: {type(error).__name__}: {error}"
            ) from error
        return plan
    roles = tuple(RoleSpec(name=name, kind=worker.kind) for name, worker in config.roles().items())
    phases = tuple(
        Phase(name=f"{role.name}: {act}", acts={role.name: act}) for role in roles for act in HARDEST.get(role.kind, ())
    )
    return PipelinePlan(roles=roles, phases=phases)


def _missing(places: Mapping[str, tuple[Place, ...]], platform: Platform, per_node: int, num_nodes: int) -> list[str]:
    """One problem per role with slots beyond the last node: its first missing slot and number of unplaced workers."""
    problems = []
    for role, workers in places.items():
        unplaced = [worker for worker in workers if any(slot >= num_nodes * per_node for slot in slots_of([worker]))]
        if unplaced:
            slot = min(slot for slot in slots_of(unplaced[:1]) if slot >= num_nodes * per_node)
            count = f"{len(unplaced)} of {len(workers)} workers of {role} cannot be placed"
            problems.append(f"{count}: {no_such_slot(role, slot, platform, per_node, num_nodes)}")
    return problems


def _not_on_this_host(places: Mapping[str, tuple[Place, ...]], platform: Platform, per_node: int) -> list[str]:
    """One problem per role with slots beyond this host's devices: `num_gpus_per_node` may exceed the device count."""
    here = per_node if platform.slots_share_cores else platform.device_count()
    missing = {
        role: [slot for slot in slots_of(workers) if here <= slot < per_node] for role, workers in places.items()
    }
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
        for part in (part for worker in workers for part in worker.parts):
            if part.slots:
                highest[part.node] = max(highest.get(part.node, 0), max(part.local_indices) + 1)
    if not highest or platform.slots_share_cores:
        return ()
    slot_counts = ", ".join(f"{highest[node]}" for node in sorted(highest))
    nodes = f"{len(highest)} nodes" if len(highest) > 1 else "one node"
    unknown = "" if num_nodes is not None else " (the number of nodes of the cluster is unknown: give --nodes N)"
    return (
        f"Executor {executor.name} reserves {platform.resource_name} {slot_counts} on {nodes} together before any role"
        f" starts{unknown}. If other jobs occupy these slots, the run waits for at most"
        f" {executor.placement_timeout_s} s. Then it ends and names the missing slots",
    )
