"""Predicted and measured memory of each process, for the run's record and report."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll_core.errors import RollError
from roll_core.runtime.cluster.placement import slots_per_node
from roll_core.runtime.planning.placing import Placing, pipeline_plan, weight_choices
from roll_core.runtime.planning.plan import Capacity, Plan, plan_with

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from roll_core.plugins.registry import Registry
    from roll_core.runtime.cluster.executors import ExecutorName
    from roll_core.runtime.cluster.memory_use import MemoryUse
    from roll_core.runtime.cluster.placement import Place
    from roll_core.spec.config import RunConfig
    from roll_core.spec.pipeline import RoleSpec
    from roll_core.spec.platform import Platform
    from roll_core.spec.providers import PipelineProvider

log = logging.getLogger(__name__)


def plan_of_run(
    config: RunConfig,
    registry: Registry,
    pipeline: PipelineProvider,
    roles: Sequence[RoleSpec],
    platform: Platform,
    executor: ExecutorName,
    places: Mapping[str, tuple[Place, ...]],
) -> Plan | None:
    """Plan of a run whose workers are already placed. If planning fails, logs the reason and returns None.

    A run does not depend on its plan.
    """
    try:
        placing = Placing(
            pipeline=replace(pipeline_plan(pipeline, config), roles=tuple(roles)),
            platform=platform,
            per_node=slots_per_node(platform, config.num_gpus_per_node),
            num_nodes=None,
            executor=executor,
            places=places,
            weights=weight_choices(roles, config, registry, platform, executor, places),
        )
        return plan_with(config, registry, placing, Capacity(host=None, slot=None))
    except RollError as error:
        log.info("what the run will take is not known: %s", error)
        return None


def compared(plan: Plan | None, measured: Mapping[str, Iterable[MemoryUse | None]]) -> list[dict[str, Any]]:
    """One row per process: its roles and ranks, and measured and predicted bytes on host and device.

    `measured` maps each role to its memory in the order of ranks, with None for unknown.
    """
    processes: defaultdict[tuple[str, int], list[tuple[str, int, MemoryUse]]] = defaultdict(list)
    for role, uses in measured.items():
        for rank, use in enumerate(uses):
            if use is not None:
                processes[use.host, use.pid].append((role, rank, use))
    rows = []
    for (host, pid), workers in processes.items():
        roles = list(dict.fromkeys(role for role, _, _ in workers))
        begun = min(use.begun_bytes for _, _, use in workers)
        devices = [use.device_bytes for _, _, use in workers if use.device_bytes is not None]
        rows.append(
            {
                "roles": roles,
                "ranks": [rank for _, rank, _ in workers],
                "host": host,
                "pid": pid,
                "measured_bytes": max(0, max(use.peak_bytes for _, _, use in workers) - begun),
                "device_measured_bytes": max(devices) if devices else None,
                **_predicted(plan, roles),
            }
        )
    return rows


def _predicted(plan: Plan | None, roles: list[str]) -> dict[str, int | None]:
    """Predicted bytes of a process with one worker of each role: the maximum over all phases. None if unknown."""
    nothing: dict[str, int | None] = {"predicted_bytes": None, "device_predicted_bytes": None}
    if plan is None or any(role.unknown for role in plan.memory if role.role in roles):
        return nothing
    known = {role.role for role in plan.memory}
    if not known.intersection(roles):
        return nothing
    host: defaultdict[str, int] = defaultdict(int)
    device: defaultdict[str, int] = defaultdict(int)
    for phase, role, on_device, on_host in plan.taken:
        if role in roles:
            host[phase] += on_host
            device[phase] += on_device
    on_slots = not plan.placing.platform.slots_share_cores
    return {
        "predicted_bytes": max(host.values(), default=0),
        "device_predicted_bytes": max(device.values(), default=0) if on_slots else None,
    }
