"""The data-parallel ranks of one role: each holds the whole model, gradients are summed over them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from roll_core.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from roll_core.spec.model import MeshInfo

BUCKET_BYTES = 64 << 20
"""Of one collective: bounds the memory that it takes on top."""


class Replicas:
    """A process group of the ranks in `mesh`, or nothing where there is one rank."""

    def __init__(self, mesh: MeshInfo) -> None:
        self.rank, self.size, self.role = mesh.rank, mesh.world_size, mesh.role
        self.formed = False
        if mesh.world_size == 1:
            return
        if dist.is_initialized():
            raise WorkerError(
                mesh.role,
                mesh.rank,
                mesh.master_addr,
                "build",
                "this process already has a default process group; a data-parallel role needs a process of its own",
            )
        dist.init_process_group(
            mesh.backend,
            init_method=f"tcp://{mesh.master_addr}:{mesh.master_port}",
            rank=mesh.rank,
            world_size=mesh.world_size,
            timeout=timedelta(seconds=mesh.timeout_s),
        )
        self.formed = True

    def sum(self, flat: Tensor) -> None:
        """Add up a contiguous tensor over all ranks, in place; every rank gets the same bits."""
        if not self.formed:
            return
        for bucket in torch.split(flat, max(1, BUCKET_BYTES // flat.element_size())):
            dist.all_reduce(bucket)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's numbers to every rank, in place."""
        if not self.formed:
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
        """Until every rank has come here."""
        if self.formed:
            dist.barrier()

    def close(self) -> None:
        """Leave the group."""
        if self.formed:
            self.formed = False
            dist.destroy_process_group()
