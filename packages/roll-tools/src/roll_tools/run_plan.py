"""Plan of a run: placement, memory of every role in every phase, and whether it fits."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.runtime.cluster.placement import slots_of
from roll_core.spec.plan import Phase
from roll_tools.role_memory import RoleMemory, predict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.plugins.registry import Registry
    from roll_core.spec.config import RunConfig
    from roll_core.spec.plan import Activity
    from roll_tools.placement import Placement

log = logging.getLogger(__name__)

PROCESS_BYTES = 500 << 20
"""Host memory of a process that has imported torch and transformers and built no model."""
CONTEXT_BYTES = 600 << 20
"""Device memory of a process that has created its device context and its collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Free memory in bytes, per host and per slot; None if unknown."""

    host: int | None
    slot: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Required and free bytes of one memory (a node's or a slot's) in one phase."""

    where: str
    """Name of the memory: `node 0`, or `node 0, slot 3`."""
    phase: str
    num_bytes: int
    free: int | None
    by_role: tuple[tuple[str, int], ...]
    """Bytes by role, and overhead of the processes under names such as `libraries`."""

    @property
    def over(self) -> int:
        """Missing bytes; 0 if the phase fits or the free memory is unknown."""
        return 0 if self.free is None else max(0, self.num_bytes - self.free)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Placement and predicted memory of a run before it starts."""

    placement: Placement
    memory: tuple[RoleMemory, ...]
    capacity: Capacity
    loads: tuple[Load, ...]
    """Load of each memory in each phase."""

    @property
    def taken(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield phase, role, and the device and host bytes of one worker of the role."""
        for phase, roles in _phases(self.placement, self.memory):
            for role, away in roles:
                yield phase.name, role.role, *_by_memory(role, phase, away, self.placement)

    @property
    def fullest(self) -> tuple[Load, ...]:
        """The worst load of each kind of memory (`node`, `slot`), the most overfull first."""
        fullest: dict[str, Load] = {}
        for load in self.loads:
            kind = "slot" if "slot" in load.where else "node"
            if kind not in fullest or (load.over, load.num_bytes) > (fullest[kind].over, fullest[kind].num_bytes):
                fullest[kind] = load
        return tuple(sorted(fullest.values(), key=lambda load: -load.over))

    @property
    def over(self) -> int:
        """Missing bytes of the most overfull memory; 0 if the plan fits."""
        return max((load.over for load in self.loads), default=0)

    @property
    def known(self) -> bool:
        """True if the memory of every role with a model and the free bytes of every memory are known."""
        return not any(role.unknown for role in self.memory) and all(load.free is not None for load in self.loads)

    @property
    def starts(self) -> bool:
        """True if every worker has a place."""
        return not self.placement.problems


def plan_with(config: RunConfig, registry: Registry, placement: Placement, capacity: Capacity) -> Plan:
    """Make the plan of a config for a given placement and capacity."""
    slot = capacity.host if placement.platform.slots_share_cores else capacity.slot
    memory = predict(config, registry, placement, slot)
    phases = _phases(placement, memory)
    loads = tuple(load for phase, roles in phases for load in _phase_loads(phase, placement, roles, capacity))
    return Plan(placement=placement, memory=memory, capacity=capacity, loads=loads)


# -- phases ------------------------------------------------------------------------------------------------------------


ALL = frozenset({"weights", "gradients", "optimizer", "kv cache"})
"""Kinds of memory that leave the slots (`MemoryItem.what`)."""
Moved = list[tuple[RoleMemory, frozenset[str]]]
"""Roles, and the kinds of their memory that have left the slots."""


def _phases(placement: Placement, memory: tuple[RoleMemory, ...]) -> Iterator[tuple[Phase, Moved]]:
    """Yield each phase with the roles that exist in it, as `cluster.leases` moves their memory.

    Roles start one after the other; earlier roles offload from the slots that they share with the starting role. The
    phases are those of a step that follows another one.
    """
    known = [role for role in memory if not role.unknown]
    for index, role in enumerate(known):
        phase = Phase(name=f"start of {role.role}", acts={role.role: "start"})
        yield phase, _moved([(started, frozenset[str]()) for started in known[: index + 1]], phase, placement)
    roles: Moved = [(role, frozenset()) for role in known]
    for is_first in (True, False):
        for phase in placement.pipeline.phases:
            roles = _moved(roles, phase, placement)
            if not is_first:
                yield phase, roles


def _moved(roles: Moved, phase: Phase, placement: Placement) -> Moved:
    """Roles after those of the phase have taken their slots: others leave these, and each acting role returns."""
    places, moved = placement.places, []
    for role, away in roles:
        mine = slots_of(places[role.role])
        if any(mine & slots_of(places[other]) for other in phase.acts if other != role.role):
            away = ALL
        moved.append((role, away - _needs(role, phase)))
    return moved


def _needs(role: RoleMemory, phase: Phase) -> frozenset[str]:
    """Memory that a role moves back to its slots for a phase."""
    act = phase.acts.get(role.role)
    if act in (None, "score", "publish"):
        return frozenset({"weights"} if act else ())
    if act == "receive" and any(use.what == "kv cache" and use.during for use in role.uses):
        return ALL - {"kv cache"}  # allocated again by the first request
    return ALL


def _phase_loads(phase: Phase, placement: Placement, roles: Moved, capacity: Capacity) -> list[Load]:
    nodes: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    slots: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for role, away in roles:
        device, host = _by_memory(role, phase, away, placement)
        for part in (part for worker in placement.places[role.role] for part in worker.parts):
            nodes[part.node][role.role] += host
            for slot in part.slots if _on_slots(role, placement) else ():
                slots[slot][role.role] += device
                contexts = 0 if placement.executor.in_process else slots[slot]["device context"]
                slots[slot]["device context"] = contexts + CONTEXT_BYTES
    nodes[0]["libraries"] += PROCESS_BYTES  # the driver
    for workers in () if placement.executor.in_process else placement.places.values():
        for part in (part for worker in workers for part in worker.parts):
            nodes[part.node]["libraries"] += PROCESS_BYTES
    memories = [(f"node {node}", by_role, capacity.host) for node, by_role in sorted(nodes.items())]
    for slot, by_role in sorted(slots.items()):
        memories.append((f"node {slot // placement.per_node}, slot {slot}", by_role, capacity.slot))
    return [
        Load(
            where=where,
            phase=phase.name,
            num_bytes=sum(by_role.values()),
            free=free,
            by_role=tuple((name, count) for name, count in by_role.items() if count),
        )
        for where, by_role, free in memories
    ]


def _on_slots(role: RoleMemory, placement: Placement) -> bool:
    """True if the role's slots have memory of their own (accelerators)."""
    return not placement.platform.slots_share_cores and any(worker.slots for worker in placement.places[role.role])


def _by_memory(role: RoleMemory, phase: Phase, away: frozenset[str], placement: Placement) -> tuple[int, int]:
    """Device and host bytes of one worker in a phase."""
    act: Activity = phase.acts.get(role.role, "wait")
    device = host = 0
    for use in role.taken(act):
        if act == "wait" and use.during and "start" in phase.acts.values():
            continue  # allocated by the first step, or only while the role itself started
        if role.offloads and use.offloads and use.what in away:
            # An engine frees this memory; a trainer moves it to the host, except gradients, which are zero then.
            moves = role.kind != "generate" and use.what != "gradients"
            host += use.num_bytes if moves and use.on == "device" else 0
        elif use.on == "device":
            device += use.num_bytes
        else:
            host += use.num_bytes
    return (device, host) if _on_slots(role, placement) else (0, device + host)


# -- for the report of a run -------------------------------------------------------------------------------------------


def prediction(plan: Plan) -> dict[str, Any]:
    """The predicted memory of a run as plain values: of each phase and role, bytes of one worker on device and host."""
    return {
        "unknown": [role.role for role in plan.memory if role.unknown],
        "on_slots": not plan.placement.platform.slots_share_cores,
        "phases": [list(row) for row in plan.taken],
    }
