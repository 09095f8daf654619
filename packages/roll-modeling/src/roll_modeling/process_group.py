"""The default process group of a role's ranks, and membership in it."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from roll_core.errors import NonFiniteError, WorkerError
from roll_core.spec.module_program import move_tensors
from roll_weight_transports.rendezvous import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

    from roll_core.spec.model import MeshInfo

_num_alone = 0
"""Number of single-rank roles in this process. They share one group: a process has only one default group."""


def select_device(device: torch.device) -> None:
    """Make `device` the current one of this thread: compiled kernels launch there, and collectives of objects use it.

    The current device is a property of each thread, and at first device 0. Does nothing for the host.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


class ProcessGroup:
    """Membership of this rank, from construction to `close`. Single ranks get a group too: some engines need one."""

    def __init__(self, mesh: MeshInfo) -> None:
        """Join the group. Collective. Raises `WorkerError` if this process belongs to the ranks of another role."""
        global _num_alone
        self.rank, self.size = mesh.rank, mesh.world_size
        self.device = torch.device(mesh.device)
        self._member = False
        self._store: Store | None = None
        self._num_exchanges = 0
        options: dict[str, Any] = {}
        if self.device.type != "cpu":
            select_device(self.device)
            options["device_id"] = torch.device(self.device.type, self.device.index or 0)
        if dist.is_initialized():
            if self.size > 1 or not _num_alone:
                reason = "this process already has a default process group; this role needs a process of its own"
                raise WorkerError(mesh.role, mesh.rank, mesh.master_addr, "build", reason)
        elif self.size == 1:
            dist.init_process_group(mesh.backend, store=HashStore(), rank=0, world_size=1, **options)
        else:
            self._store = _open_store(mesh)
            dist.init_process_group(
                mesh.backend,
                store=self._store,
                rank=mesh.rank,
                world_size=mesh.world_size,
                timeout=timedelta(seconds=mesh.timeout_s),
                **options,
            )
        _num_alone += self.size == 1
        self._member = True

    def wait(self) -> None:
        """Block until every rank has called this method (barrier)."""
        if self.size > 1:
            dist.barrier()

    def most(self, numbers: Sequence[int], group: Any = None) -> list[int]:
        """Elementwise maximum of `numbers` over a group of ranks, by default all. Collective over the group.

        All ranks exchange them on their hosts: a device would compute its whole queue before the numbers arrive.
        """
        if self.size == 1:
            return list(numbers)
        if group is None and self._store is not None and self.device.type != "cpu":
            return self._most_of_hosts(numbers, self._store)
        maxima = move_tensors({"numbers": torch.tensor(numbers, dtype=torch.int64)}, self.device)["numbers"]
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        largest: list[int] = maxima.tolist()
        return largest

    def _most_of_hosts(self, numbers: Sequence[int], store: Store) -> list[int]:
        key = f"most/{self._num_exchanges}"
        store.append(key, ",".join(str(int(number)) for number in numbers) + ";")  # type: ignore[attr-defined]  # missing in stubs
        if store.add(f"{key}/ranks", 1) == self.size:
            store.set(f"{key}/complete", "")
        store.wait([f"{key}/complete"])
        ranks = [map(int, rank.split(",")) for rank in store.get(key).decode().split(";")[:-1]]
        if self.rank == 0 and self._num_exchanges:  # all ranks have read the previous numbers
            for name in ("", "/ranks", "/complete"):
                store.delete_key(f"most/{self._num_exchanges - 1}{name}")
        self._num_exchanges += 1
        return [max(column) for column in zip(*ranks, strict=True)]

    def raise_together(self, error: NonFiniteError | None) -> None:
        """Raise on all ranks if any rank has an error. Collective.

        A rank with an error raises its own; the others raise the first rank's error. Otherwise one rank would stop
        while the others block in their next collective. Without an error only one number is exchanged.
        """
        if self.size > 1 and self.most([error is not None])[0]:
            said: list[str] = [""] * self.size
            dist.all_gather_object(said, "" if error is None else str(error))
            rank = next(i for i, message in enumerate(said) if message)
            error = error or NonFiniteError(f"rank {rank}: {said[rank]}")
        if error is not None:
            raise error

    @property
    def is_last(self) -> bool:
        """True if closing this membership destroys the process's group."""
        return self._member and (self.size > 1 or _num_alone == 1)

    def close(self) -> None:
        """Leave the group. The last member of a shared group destroys it. Idempotent."""
        global _num_alone
        if not self._member:
            return
        ends, self._member = self.is_last, False
        _num_alone -= self.size == 1
        if ends and dist.is_initialized():
            dist.destroy_process_group()
        if self._store is not None and hasattr(self._store, "close"):  # torch's own closes with its last reference
            self._store.close()
        self._store = None


def _open_store(mesh: MeshInfo) -> Store:
    """Open the authenticated store for CPU ranks that share a secret; otherwise torch's own on `master_addr`.

    Threads of nccl and hccl read the store at any time. A store written in Python would need the GIL for that. The
    thread that destroys the group may hold the GIL while it waits for them.
    """
    timeout = timedelta(seconds=mesh.timeout_s)
    if mesh.secret and torch.device(mesh.device).type == "cpu":
        return open_store(mesh.rank, mesh.master_addr, mesh.master_port, mesh.secret, mesh.timeout_s)
    if mesh.rank:
        return TCPStore(mesh.master_addr, mesh.master_port, mesh.world_size, timeout=timeout)
    family = socket.AF_INET6 if ":" in mesh.master_addr else socket.AF_INET
    with socket.create_server((mesh.master_addr, mesh.master_port), family=family) as listener:
        return TCPStore(
            mesh.master_addr,
            mesh.master_port,
            mesh.world_size,
            is_master=True,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
