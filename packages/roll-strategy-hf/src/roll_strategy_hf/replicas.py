"""Collectives over the data-parallel ranks of one role; each rank holds the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from roll_modeling.process_group import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from roll_core.spec.model import MeshInfo

BUCKET_BYTES = 64 << 20
"""Maximum bytes per all-reduce; bounds its temporary memory."""


class Replicas:
    """Collectives over the ranks of `mesh`; no-ops if there is only one rank."""

    def __init__(self, mesh: MeshInfo) -> None:
        self.rank, self.size = mesh.rank, mesh.world_size
        self.group = ProcessGroup(mesh) if self.size > 1 else None
        """The ranks' process group; None for one rank."""

    def sum(self, flat: Tensor) -> None:
        """Sum a contiguous tensor over all ranks, in place; the result is bitwise equal on every rank."""
        if self.group is None:
            return
        for bucket in torch.split(flat, max(1, BUCKET_BYTES // flat.element_size())):
            dist.all_reduce(bucket)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values to all ranks, in place."""
        if self.group is None:
            return
        for tensor in tensors:
            if tensor.is_contiguous():
                dist.broadcast(tensor.detach(), 0)
            else:
                dense = tensor.detach().contiguous()
                dist.broadcast(dense, 0)
                with torch.no_grad():
                    tensor.copy_(dense)

    def wait(self) -> None:
        """Barrier: block until every rank has called it."""
        if self.group is not None:
            self.group.wait()

    def close(self) -> None:
        """Leave the process group."""
        if self.group is not None:
            self.group.close()
