"""Position of a worker among its peers, as its strategy receives it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from roll_core.spec.model import MeshInfo

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from roll_core.runtime.cluster.executors.base import Peers, Place


def mesh_info(role: str, place: Place, peers: Peers, *, backend: str, timeout_s: float) -> MeshInfo:
    """`MeshInfo` from the executor's place and peers. `timeout_s` is the timeout of collectives."""
    where = (place.rank, peers.master_addr, peers.master_port, peers.secret, timeout_s)
    return MeshInfo(
        role=role,
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_indices[0] if place.local_indices else 0,
        device=place.device,
        backend=backend,
        master_addr=peers.master_addr,
        master_port=peers.master_port,
        open_store=partial(_open_store, *where) if place.world_size > 1 else None,
        num_slots=max(1, len(place.slots)),
        num_threads=place.num_threads,
        timeout_s=timeout_s,
    )


def _open_store(*where: Any) -> Store:
    """Open the store. Imports torch only when a strategy does so."""
    from roll_core.runtime.weights.transports.store import open_store

    return open_store(*where)
