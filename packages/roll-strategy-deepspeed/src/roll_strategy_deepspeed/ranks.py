"""The ranks of one role, as torch.distributed and DeepSpeed want to be told of them."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from roll_core.errors import UnsupportedError, WorkerError
from roll_strategy_deepspeed.workarounds import build_nothing_at_start, quiet_collectives

if TYPE_CHECKING:
    from roll_core.spec.model import MeshInfo

_shared_users = 0
"""Strategies of this process that use its process group of one rank. Roles that live in one process share it."""


class Ranks:
    """A process group of the ranks in `mesh`, known to DeepSpeed. One rank alone has a group as well: DeepSpeed needs
    it."""

    def __init__(self, mesh: MeshInfo) -> None:
        """Collective. Raises `WorkerError` if this process belongs to another group already."""
        self.rank, self.size = mesh.rank, mesh.world_size
        self.device = torch.device(mesh.device)
        self.formed = False
        self._tell_deepspeed()
        if self.size > 1:
            self._join(mesh)
        else:
            self._share(mesh)
        self.formed = True

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
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the group; may be called several times."""
        global _shared_users
        if not self.formed:
            return
        self.formed = False
        if self.size == 1:
            _shared_users -= 1
            if _shared_users:
                return
        from deepspeed import comm

        if comm.is_initialized():
            comm.destroy_process_group()
        if dist.is_initialized():
            dist.destroy_process_group()

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

    def _join(self, mesh: MeshInfo) -> None:
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
            **self._bound_device(),
        )

    def _share(self, mesh: MeshInfo) -> None:
        global _shared_users
        if not dist.is_initialized():
            dist.init_process_group(mesh.backend, store=HashStore(), rank=0, world_size=1, **self._bound_device())
        elif dist.get_world_size() > 1:
            raise WorkerError(
                mesh.role,
                mesh.rank,
                mesh.master_addr,
                "build",
                "this process belongs to the ranks of another role; the role needs a process of its own",
            )
        _shared_users += 1

    def _bound_device(self) -> dict[str, Any]:
        """Accelerators' collectives want to know the device before the first of them."""
        return {} if self.device.type == "cpu" else {"device_id": self.device}
