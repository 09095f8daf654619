"""Placement of a run's workers, its weight transports, and the pipeline's plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roll_core.config.weight_transports import TransportChoice, choose_transport
from roll_core.errors import PluginError
from roll_core.plugins.targets import load_target
from roll_core.runtime.workers.build import provider_of, role_config
from roll_core.spec.pipeline import RoleSpec
from roll_core.spec.plan import UPDATE, Phase, PipelinePlan
from roll_core.spec.transport import DeviceFacts, RoleFacts, WorkerFacts
from roll_core.weights.device_memory import device_memory

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
        return {place.node for workers in self.places.values() for place in workers}


def weight_choices(
    roles: Sequence[RoleSpec],
    config: RunConfig,
    registry: Registry,
    platform: Platform,
    executor: ExecutorProvider,
    places: Mapping[str, tuple[Place, ...]],
) -> dict[tuple[str, str], TransportChoice]:
    """Weight transport by `(trainer, engine)`, before any self-test.

    Raises `UnsupportedError` if no transport connects a pair.
    """
    facts = {role.name: _facts(role, config, registry, platform, executor, places[role.name]) for role in roles}
    return {
        (role.model_from, role.name): choose_transport(
            registry, facts[role.model_from], facts[role.name], config.weight_transport
        )
        for role in roles
        if role.kind == "generate" and role.model_from in facts
    }


def _facts(
    role: RoleSpec,
    config: RunConfig,
    registry: Registry,
    platform: Platform,
    executor: ExecutorProvider,
    places: Sequence[Place],
) -> RoleFacts:
    """The `RoleFacts` that the workers would report. A worker's first slot stands for its device."""
    if role.kind == "reward":
        return RoleFacts(role=role.name, workers=())
    can = provider_of(role, role_config(config, role.name), registry).capabilities
    shares_device = device_memory(platform.device_type) is not None and getattr(can, "device_weights", True)
    workers = tuple(
        WorkerFacts(
            host=f"node {place.node}",
            node=place.node,
            pid=0 if executor.in_process else hash((role.name, place.rank)),
            slots=place.slots,
            device=DeviceFacts(uuid=f"slot {place.slots[0]}" if place.slots and shares_device else ""),
        )
        for place in places
    )
    directory = config.model_update_dir or ""
    return RoleFacts(role=role.name, workers=workers, weight_transports=can.weight_transports, directory=directory)


def pipeline_plan(provider: PipelineProvider, config: RunConfig) -> PipelinePlan:
    """The pipeline's own plan. If it declares none, assume that its roles work one after the other.

    Raises `PluginError` if the pipeline's plan function fails.
    """
    if provider.plan:
        make = load_target(provider.plan, owner=f"pipeline {provider.name}")
        try:
            found: PipelinePlan = make(config)
        except Exception as error:  # plugin code may raise anything
            raise PluginError(
                f"pipeline {provider.name}: {provider.plan} failed: {type(error).__name__}: {error}"
            ) from error
        return found
    roles = tuple(RoleSpec(name=name, kind=worker.kind) for name, worker in config.roles().items())
    each = [(role.name, act) for role in roles for act in HARDEST.get(role.kind, ())]
    return PipelinePlan(roles=roles, phases=tuple(Phase(name=f"{name}: {act}", acts={name: act}) for name, act in each))
