"""The process group that FSDP2 needs, also where a role has one rank."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from roll_core.errors import WorkerError

if TYPE_CHECKING:
    from roll_core.spec.model import MeshInfo

_num_alone = 0
"""Roles of one rank in this process: they share a group of one, since a process has one default group."""


class ProcessGroup:
    """Membership in the default process group of a role's ranks, from construction to `close`."""

    def __init__(self, mesh: MeshInfo) -> None:
        global _num_alone
        self._member = False
        self._alone = mesh.world_size == 1
        device = torch.device(mesh.device)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index or 0)
        if dist.is_initialized():
            if not (self._alone and _num_alone):
                raise WorkerError(
                    mesh.role,
                    mesh.rank,
                    mesh.master_addr,
                    "build",
                    "this process already has a default process group; a sharded role needs a process of its own",
                )
        elif self._alone:
            dist.init_process_group(mesh.backend, store=HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(
                mesh.backend,
                init_method=f"tcp://{mesh.master_addr}:{mesh.master_port}",
                rank=mesh.rank,
                world_size=mesh.world_size,
                timeout=timedelta(seconds=mesh.timeout_s),
            )
        _num_alone += self._alone
        self._member = True

    def close(self) -> None:
        """Leave; the last to leave a shared group ends it. May be called several times."""
        global _num_alone
        if not self._member:
            return
        self._member = False
        if self._alone:
            _num_alone -= 1
            if _num_alone:
                return
        dist.destroy_process_group()
