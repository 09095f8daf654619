"""The data-parallel ranks of one role: each holds the whole model, gradients are summed over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from roll_modeling.process_group import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from roll_core.errors import NonFiniteError
    from roll_core.spec.model import MeshInfo

BUCKET_BYTES = 64 << 20
"""Of one collective: bounds the memory that it takes on top."""


class Replicas:
    """Collectives of the ranks in `mesh`; where there is one rank, they do nothing."""

    def __init__(self, mesh: MeshInfo) -> None:
        self.rank, self.size = mesh.rank, mesh.world_size
        self._group = ProcessGroup(mesh) if self.size > 1 else None

    def sum(self, flat: Tensor) -> None:
        """Add up a contiguous tensor over all ranks, in place; every rank gets the same bits."""
        if self._group is None:
            return
        for bucket in torch.split(flat, max(1, BUCKET_BYTES // flat.element_size())):
            dist.all_reduce(bucket)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's numbers to every rank, in place."""
        if self._group is None:
            return
        for tensor in tensors:
            if tensor.is_contiguous():
                dist.broadcast(tensor.detach(), 0)
            else:
                dense = tensor.detach().contiguous()
                dist.broadcast(dense, 0)
                with torch.no_grad():
                    tensor.copy_(dense)

    def raise_together(self, error: NonFiniteError | None) -> None:
        """See `ProcessGroup.raise_together`."""
        if self._group is not None:
            self._group.raise_together(error)
        elif error is not None:
            raise error

    def wait(self) -> None:
        """Until every rank has come here."""
        if self._group is not None:
            self._group.wait()

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
