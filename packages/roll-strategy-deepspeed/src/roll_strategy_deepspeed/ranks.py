"""The ranks of one role, as torch.distributed and DeepSpeed want to be told of them."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from roll_core.errors import UnsupportedError
from roll_modeling.process_group import ProcessGroup
from roll_strategy_deepspeed.workarounds import build_nothing_at_start, quiet_collectives

if TYPE_CHECKING:
    from roll_core.errors import NonFiniteError
    from roll_core.spec.model import MeshInfo


class Ranks:
    """The ranks in `mesh`, one process group that DeepSpeed knows."""

    def __init__(self, mesh: MeshInfo) -> None:
        """Collective. Raises `WorkerError` if this process belongs to another group already."""
        self.rank, self.size = mesh.rank, mesh.world_size
        self.device = torch.device(mesh.device)
        self._tell_deepspeed()
        self._group = ProcessGroup(mesh)

    def most(self, number: int) -> int:
        """The largest of the numbers that the ranks give. Collective."""
        if self.size == 1:
            return number
        found = torch.tensor([number], dtype=torch.int64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def of_first(self, text: str) -> str:
        """What rank 0 gives. Collective."""
        if self.size == 1:
            return text
        said = [text]
        dist.broadcast_object_list(said, 0, device=self.device)
        return said[0]

    def wait(self) -> None:
        """Until every rank has come here."""
        self._group.wait()

    def raise_together(self, error: NonFiniteError | None) -> None:
        """See `ProcessGroup.raise_together`."""
        self._group.raise_together(error)

    def close(self) -> None:
        """Leave the group; may be called several times."""
        from deepspeed import comm

        if self._group.is_last and comm.is_initialized():
            # Which ends torch's group too, and forgets DeepSpeed's own of it.
            comm.destroy_process_group()
        self._group.close()

    def _tell_deepspeed(self) -> None:
        """DeepSpeed learns these only from the environment, the first of them when it is imported."""
        os.environ["DS_ACCELERATOR"] = self.device.type
        os.environ["LOCAL_RANK"] = str(self.device.index or 0)
        with warnings.catch_warnings():
            # Of modules that it imports and that are not used here.
            warnings.simplefilter("ignore")
            import deepspeed
        found = deepspeed.get_accelerator().device_name()
        if found != self.device.type:
            raise UnsupportedError(
                f"DeepSpeed was imported for {found} before this role asked for {self.device.type}; a process has one"
            )
        build_nothing_at_start()
        quiet_collectives()
