"""The ranks of one role, initialized for torch.distributed and DeepSpeed."""

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
    """The ranks in `mesh`: one process group, also registered with DeepSpeed."""

    def __init__(self, mesh: MeshInfo) -> None:
        """Join the group. Collective. Raises `WorkerError` if this process already belongs to another group."""
        self.rank, self.size = mesh.rank, mesh.world_size
        self.device = torch.device(mesh.device)
        self._tell_deepspeed()
        self._group = ProcessGroup(mesh)

    def most(self, number: int) -> int:
        """The maximum of `number` over all ranks. Collective."""
        if self.size == 1:
            return number
        found = torch.tensor([number], dtype=torch.int64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def of_first(self, text: str) -> str:
        """Rank 0's `text`, on every rank. Collective."""
        if self.size == 1:
            return text
        said = [text]
        dist.broadcast_object_list(said, 0, device=self.device)
        return said[0]

    def wait(self) -> None:
        """Block until every rank has reached this call."""
        self._group.wait()

    def raise_together(self, error: NonFiniteError | None) -> None:
        """Raise on all ranks if any rank has an error; see `ProcessGroup.raise_together`. Collective."""
        self._group.raise_together(error)

    def close(self) -> None:
        """Leave the process group. Idempotent."""
        from deepspeed import comm

        if self._group.is_last and comm.is_initialized():
            # This also destroys torch's process group, and clears DeepSpeed's reference to it.
            comm.destroy_process_group()
        self._group.close()

    def _tell_deepspeed(self) -> None:
        """Set the environment variables that DeepSpeed reads. It reads `DS_ACCELERATOR` at import."""
        os.environ["DS_ACCELERATOR"] = self.device.type
        os.environ["LOCAL_RANK"] = str(self.device.index or 0)
        with warnings.catch_warnings():
            # These warnings concern modules that are not used here.
            warnings.simplefilter("ignore")
            import deepspeed
        found = deepspeed.get_accelerator().device_name()
        if found != self.device.type:
            raise UnsupportedError(
                f"DeepSpeed was imported for {found} before this role asked for {self.device.type}; a process has one"
            )
        build_nothing_at_start()
        quiet_collectives()
