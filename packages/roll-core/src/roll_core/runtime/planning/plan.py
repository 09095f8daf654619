"""The plan of a run: places, memory of every role and phase, the verdict, and the smallest change that makes it fit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.errors import RollError
from roll_core.host import free_memory_bytes
from roll_core.runtime.cluster.placement import slots_of
from roll_core.runtime.planning.placing import Placing, place
from roll_core.runtime.planning.predicting import RoleMemory, predict
from roll_core.spec.plan import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.config import LoadedConfig
    from roll_core.plugins.registry import Registry
    from roll_core.spec.config import RunConfig
    from roll_core.spec.plan import Act, Use
    from roll_core.spec.platform import Platform

PROCESS_BYTES = 500 << 20
"""Of the host: what a process holds when torch and transformers are imported and nothing is built."""
CONTEXT_BYTES = 600 << 20
"""Of an accelerator: what a process holds when it has opened it and its collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Memory that a run may take; None where it is not known."""

    host: int | None
    slot: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is wanted of one memory in one phase."""

    where: str
    """`node 0`, `node 0, slot 3`."""
    phase: str
    num_bytes: int
    free: int | None
    by_role: tuple[tuple[str, int], ...]
    """And what the processes hold that are there, under the name of what it is."""

    @property
    def over(self) -> int:
        """Bytes that it lacks; 0 where it fits or nobody knows."""
        return 0 if self.free is None else max(0, self.num_bytes - self.free)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is known of a run before it starts."""

    placing: Placing
    memory: tuple[RoleMemory, ...]
    capacity: Capacity
    loads: tuple[Load, ...]
    """Of each memory in each phase."""

    @property
    def taken(self) -> Iterator[tuple[str, str, int, int]]:
        """Phase, role, and bytes of one of its workers on the device and on the host."""
        for phase, roles in _phases(self.placing, self.memory):
            for role in roles:
                yield phase.name, role.role, *_by_memory(role, phase, self.placing)

    @property
    def fullest(self) -> tuple[Load, ...]:
        """Of each kind of memory the phase that wants most of it, those first that do not fit."""
        found: dict[str, Load] = {}
        for load in self.loads:
            kind = "slot" if "slot" in load.where else "node"
            if kind not in found or (load.over, load.num_bytes) > (found[kind].over, found[kind].num_bytes):
                found[kind] = load
        return tuple(sorted(found.values(), key=lambda load: -load.over))

    @property
    def over(self) -> int:
        """Bytes by which the worst memory does not fit."""
        return max((load.over for load in self.loads), default=0)

    @property
    def known(self) -> bool:
        """Every role with a model says what it takes, and every memory how much it has."""
        return not any(role.unknown for role in self.memory) and all(load.free is not None for load in self.loads)

    @property
    def starts(self) -> bool:
        """Every worker has its place."""
        return not self.placing.problems


def make_plan(
    loaded: LoadedConfig,
    registry: Registry,
    *,
    num_nodes: int | None = None,
    slot_bytes: int | None = None,
    host_bytes: int | None = None,
) -> Plan:
    """The plan of a config. What the user says of the machines wins over what is found here.

    Raises `PlacementError` where not even the places can be told.
    """
    placing = place(loaded, registry, num_nodes=num_nodes)
    capacity = _capacity(placing, slot_bytes=slot_bytes, host_bytes=host_bytes)
    return plan_with(loaded.config, registry, placing, capacity)


def plan_with(config: RunConfig, registry: Registry, placing: Placing, capacity: Capacity) -> Plan:
    """The plan of a config whose workers have these places."""
    slot = capacity.host if placing.platform.slots_share_cores else capacity.slot
    memory = predict(config, registry, placing, slot)
    return Plan(placing=placing, memory=memory, capacity=capacity, loads=_loads(placing, memory, capacity))


def _capacity(placing: Placing, *, slot_bytes: int | None, host_bytes: int | None) -> Capacity:
    platform = placing.platform
    if host_bytes is None and placing.here:
        host_bytes = free_memory_bytes()
    if platform.slots_share_cores:
        return Capacity(host=host_bytes, slot=None)
    if slot_bytes is None and placing.here:
        slot_bytes = _free_on_slots(platform)
    return Capacity(host=host_bytes, slot=slot_bytes)


def _free_on_slots(platform: Platform) -> int | None:
    """Of the slot that has least."""
    try:
        found = [platform.memory(index) for index in range(platform.device_count())]
    except RollError:
        return None
    return min((each["total"] - each["used"] for each in found), default=None)


# -- phases ------------------------------------------------------------------------------------------------------------


def _loads(placing: Placing, memory: tuple[RoleMemory, ...], capacity: Capacity) -> tuple[Load, ...]:
    loads: list[Load] = []
    for phase, roles in _phases(placing, memory):
        loads += _phase_loads(phase, placing, roles, capacity)
    return tuple(loads)


def _phases(placing: Placing, memory: tuple[RoleMemory, ...]) -> Iterator[tuple[Phase, list[RoleMemory]]]:
    """With the roles that are there. They start one after the other, with the slots that they share to themselves."""
    known = [role for role in memory if not role.unknown]
    for index, role in enumerate(known):
        yield Phase(name=f"start of {role.role}", acts={role.role: "start"}), known[: index + 1]
    for phase in placing.pipeline.phases:
        yield phase, known


def _phase_loads(phase: Phase, placing: Placing, roles: list[RoleMemory], capacity: Capacity) -> list[Load]:
    nodes: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    slots: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for role in roles:
        device, host = _by_memory(role, phase, placing)
        for each in placing.places[role.role]:
            nodes[each.node][role.role] += host
            for slot in each.slots if _on_slots(role, placing) else ():
                slots[slot][role.role] += device
                slots[slot]["what a process holds"] += CONTEXT_BYTES
    for node, count in _processes(placing).items():
        nodes[node]["libraries"] += count * PROCESS_BYTES
    found = [_load(f"node {node}", phase, by_role, capacity.host) for node, by_role in sorted(nodes.items())]
    for slot, by_role in sorted(slots.items()):
        where = f"node {slot // placing.per_node}, slot {slot}"
        found.append(_load(where, phase, by_role, capacity.slot))
    return found


def _on_slots(role: RoleMemory, placing: Placing) -> bool:
    """Its slots have memory of their own."""
    return not placing.platform.slots_share_cores and any(each.slots for each in placing.places[role.role])


def _load(where: str, phase: Phase, by_role: dict[str, int], free: int | None) -> Load:
    parts = tuple((name, count) for name, count in by_role.items() if count)
    return Load(where=where, phase=phase.name, num_bytes=sum(by_role.values()), free=free, by_role=parts)


def _by_memory(role: RoleMemory, phase: Phase, placing: Placing) -> tuple[int, int]:
    """Bytes of one worker on its slots and on the host, after those that must make room have done so."""
    act: Act = phase.acts.get(role.role, "wait")
    mine = slots_of(placing.places[role.role])
    crowded = any(mine & slots_of(placing.places[other]) for other in phase.acts if other != role.role)
    device = host = 0
    for use in role.taken(act):
        if role.makes_room and crowded and use.leaves and _goes(use, act):
            # What an engine gives up is gone; what a trainer moves is on the host meanwhile.
            host += use.num_bytes if role.kind != "generate" and use.on == "device" else 0
        elif use.on == "device":
            device += use.num_bytes
        else:
            host += use.num_bytes
    return (device, host) if _on_slots(role, placing) else (0, device + host)


def _goes(use: Use, act: Act) -> bool:
    """In a turn together with others a role keeps what it needs there (`runtime.turns`)."""
    if act == "publish":
        return use.what != "weights"
    return act == "wait"


def _processes(placing: Placing) -> dict[int, int]:
    """Of each node: the driver, and with Ray one for each worker."""
    count: dict[int, int] = defaultdict(int)
    count[0] = 1
    if placing.executor == "ray":
        for workers in placing.places.values():
            for each in workers:
                count[each.node] += 1
    return dict(count)
