"""Placement of workers: from each role's `device_mapping` to the node, slots and device of each of its workers.

Slots are numbered over all nodes: slot `s` is local slot `s % slots_per_node` of node `s // slots_per_node`. Worker `r`
of a role takes the `r`-th run of `num_gpus_per_worker` slots of its mapping. Roles may share slots. The module only
computes: it touches no device and contacts no cluster, so `roll-core plan` can show the placement of a run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roll_core.errors import PlacementError, UnsupportedError
from roll_core.host import usable_cores
from roll_core.spec.devices import is_even, slots_by_node
from roll_core.spec.platform import HOST_DEVICE

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from roll_core.spec.config import WorkerConfig
    from roll_core.spec.platform import Platform, RoleKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Placement of one worker: its rank, node, slots, device and CPU threads."""

    rank: int
    world_size: int
    local_rank: int = 0
    """Rank among the workers of its role on its node."""
    node: int = 0
    """Index of the node, from 0."""
    slots: tuple[int, ...] = ()
    """Global slot numbers; empty for a worker without slots."""
    local_indices: tuple[int, ...] = ()
    """The same slots, numbered on their node."""
    device: str = HOST_DEVICE
    """Torch device string, as seen by the worker's own process."""
    num_threads: int = 1
    """CPU threads for computation. Roles that share slots alternate, so each gets the full share of its slots."""
    slots_in_use: int = 0
    """Used slots of its node, which share the host's cores; 0 for a worker that needs only one thread."""
    wanted_threads: int = 0
    """The user's `OMP_NUM_THREADS`; 0 for the share of the host's cores."""
    followers: tuple[Place, ...] = ()
    """Places on further nodes, if the worker is an engine replica over several nodes."""

    @property
    def parts(self) -> tuple[Place, ...]:
        """The place on each node of the worker."""
        return (self, *self.followers)

    def threads_of(self, cores: int) -> int:
        """CPU threads of this worker on a host with `cores` cores, at least 1; the user's `OMP_NUM_THREADS` wins."""
        if self.wanted_threads and self.slots_in_use:
            return self.wanted_threads
        return max(1, cores * max(1, len(self.slots)) // self.slots_in_use) if self.slots_in_use else 1


def place_roles(
    roles: Mapping[str, WorkerConfig],
    platform: Platform,
    per_node: int,
    *,
    slots_per_worker: Mapping[str, int] | None = None,
    cores: int | None = None,
    configured: Mapping[str, WorkerConfig] | None = None,
    over_nodes: Container[str] = (),
) -> dict[str, tuple[Place, ...]]:
    """Place every worker of every role on nodes with `per_node` slots each; placements are ordered by rank.

    `configured` are all roles of the config. Those missing in `roles` are not started, for example the engine of a
    replay, but keep their share of the cores: with more threads, a role would add its sums in another order, and a
    replay would differ from the recorded run in the last digits.

    `slots_per_worker` has the numbers that strategies compute from their configurations. `cores` are the CPU cores of a
    node; by default those of this host, and other nodes are assumed to be alike. Raises `PlacementError` if the slots
    of a worker are on several nodes, except for roles `over_nodes`, whose workers have as many slots on each node. If a
    node does not exist, the executor raises when it starts.
    """
    host_cores = cores or usable_cores()
    slots = {
        name: _slots_of_workers(worker, platform, (slots_per_worker or {}).get(name)) for name, worker in roles.items()
    }
    for name, workers in slots.items():
        _check_slots(name, workers, per_node, over_nodes=name in over_nodes)
    used = {slot for workers in slots.values() for worker_slots in workers for slot in worker_slots}
    nodes = sorted({slot // per_node for slot in used}) or [0]
    for name, worker in (configured or {}).items():
        if name not in roles:
            used.update(slot for worker_slots in _slots_of_workers(worker, platform, None) for slot in worker_slots)
    in_use = Counter(slot // per_node for slot in used)
    return {
        name: _places(workers, roles[name], platform, per_node, nodes, in_use, host_cores)
        for name, workers in slots.items()
    }


def slots_per_node(platform: Platform, num_gpus_per_node: int | None) -> int:
    """Slots of a node: `num_gpus_per_node`, or the number of devices on this host. Raises `PlacementError`."""
    slots = num_gpus_per_node or platform.device_count()
    if not slots:
        raise PlacementError(
            f"the slots per node are unknown, because this host has no device of platform {platform.name}: set"
            " num_gpus_per_node"
        )
    return slots


def slots_of(places: Iterable[Place]) -> frozenset[int]:
    """Global numbers of all slots of a role."""
    return frozenset(slot for place in places for part in place.parts for slot in part.slots)


def check_local(
    role: str, kind: RoleKind, places: Sequence[Place], platform: Platform, per_node: int, *, here: bool = True
) -> None:
    """Check that the local executor, one process, can run the workers of a role.

    With `here`, the process is on this host, and may use only its devices. Raises `UnsupportedError` or
    `PlacementError`.
    """
    if kind in ("train", "score") and len(places) > 1:
        raise UnsupportedError(
            f"{role} has {len(places)} workers, but the local executor supports one worker for a role that trains or"
            " scores: choose another executor, or give it one slot"
        )
    num_slots = min(per_node, platform.device_count()) if here and not platform.slots_share_cores else per_node
    for slot in sorted(slots_of(places)):
        if slot >= num_slots:
            raise PlacementError(no_such_slot(role, slot, platform, num_slots, 1))


def _slots_of_workers(worker: WorkerConfig, platform: Platform, computed: int | None) -> list[tuple[int, ...]]:
    """Slots of each worker, by rank; empty tuples for a role without slots."""
    per_worker = computed or worker.num_gpus_per_worker or 1
    mapping = worker.device_mapping
    if mapping is None:
        world_size = worker.world_size or 1
        if worker.kind == "reward" or not platform.slots_share_cores:
            return [()] * world_size
        mapping = tuple(range(world_size * per_worker))
    return [tuple(mapping[start : start + per_worker]) for start in range(0, len(mapping), per_worker)]


def _check_slots(name: str, workers: Sequence[tuple[int, ...]], per_node: int, *, over_nodes: bool) -> None:
    for rank, slots in enumerate(workers):
        parts = slots_by_node(slots, per_node)
        if len(parts) > 1 and not (over_nodes and is_even(parts, per_node)):
            nodes = ", ".join(str(part[0] // per_node) for part in parts)
            expected = "must be on one node" if not over_nodes else "must be as many on each node, node by node"
            raise PlacementError(
                f"{name} rank {rank}: slots {', '.join(map(str, slots))} are on nodes {nodes} of {per_node} slots each"
                f" (num_gpus_per_node), but the slots of one worker {expected}"
            )


def no_such_slot(name: str, slot: int, platform: Platform, per_node: int, num_nodes: int) -> str:
    """Error message for a slot that does not exist: the role, the slot, the slots that exist, and what to change."""
    total = per_node * num_nodes
    exist = f"are {total} slots (0 to {total - 1})" if total > 1 else "is one slot (0)" if total else "is none"
    where = f"{num_nodes} nodes with {per_node} slots each" if num_nodes != 1 else "one node"
    problem = f"{name} uses slot {slot}, but there {exist} on {where}"
    if platform.slots_share_cores:
        return (
            f"{problem}. A slot here is a share of the host's cores: set num_gpus_per_node: {slot + 1} for more slots"
        )
    return f"{problem}. Change device_mapping, or num_gpus_per_node if the nodes have more slots, or add nodes"


def _places(
    workers: Sequence[tuple[int, ...]],
    config: WorkerConfig,
    platform: Platform,
    per_node: int,
    nodes: Sequence[int],
    in_use: Mapping[int, int],
    cores: int,
) -> tuple[Place, ...]:
    ranks_on: dict[int, int] = {}

    def place(rank: int, world_size: int, slots: tuple[int, ...]) -> Place:
        node = slots[0] // per_node if slots else nodes[rank % len(nodes)]
        local = tuple(slot % per_node for slot in slots)
        computes = bool(slots) or config.kind != "reward"
        sharers = max(in_use.get(node, 0), 1 if slots else -(-len(workers) // len(nodes)))
        placed = Place(
            rank=rank,
            world_size=world_size,
            local_rank=ranks_on.get(node, 0),
            node=node,
            slots=slots,
            local_indices=local,
            device=platform.device(local[0]) if slots else HOST_DEVICE,
            slots_in_use=sharers if computes else 0,
        )
        ranks_on[node] = placed.local_rank + 1
        return replace(placed, num_threads=placed.threads_of(cores))

    parts = [slots_by_node(slots, per_node) or [()] for slots in workers]
    num_followers = sum(len(others) for _, *others in parts)
    placed: list[Place] = []
    for first, *others in parts:
        leader = place(len(placed), len(workers), first)
        ahead = sum(len(leader.followers) for leader in placed)
        followers = tuple(place(ahead + i, num_followers, slots) for i, slots in enumerate(others))
        placed.append(replace(leader, followers=followers))
    return tuple(placed)
