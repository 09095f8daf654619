"""Where a worker stands among its peers, as its strategy is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.model import MeshInfo

if TYPE_CHECKING:
    from roll_core.runtime.executors.base import Peers, Place


def mesh_info(role: str, place: Place, peers: Peers, *, backend: str, timeout_s: float) -> MeshInfo:
    """From what the executor knows. `timeout_s` is that of collectives."""
    return MeshInfo(
        role=role,
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_indices[0] if place.local_indices else 0,
        device=place.device,
        backend=backend,
        master_addr=peers.master_addr,
        master_port=peers.master_port,
        num_slots=max(1, len(place.slots)),
        num_threads=place.num_threads,
        timeout_s=timeout_s,
    )
