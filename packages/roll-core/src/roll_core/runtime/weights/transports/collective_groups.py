"""Process groups of the transport `collective`: gloo on the host, or the platform's own library (nccl, hccl) between
devices.

They are made here, from a store of their own: the default process group, which belongs to the strategies, is neither
used nor needed.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import UnsupportedError
from roll_core.runtime.placement import HOST_BACKEND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

    from roll_core.runtime.weights.plan import Deadline
    from roll_core.runtime.weights.transports.store import RemoteStore

LOOPBACK = "127.0.0.1"
SENDER = 0
"""Rank of the sender in the group; receiver r has rank r + 1."""
OFF = "off"
"""Key of the store: the publish has failed elsewhere, and nobody shall wait for it."""
LOOK_S = 0.002
"""How often a work on a device is asked whether it is done."""
ASK_S = 0.25
"""How often the store is asked meanwhile whether the publish was called off, and with that whether the sender lives."""
WATCHDOGS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING")
"""Read when a group is made. Unless it is 0 the group's watchdog ends the process where a peer is gone or late; a
trainer has to outlive its engines."""
_NEVER = timedelta(days=1)
"""For libraries whose own timeout would end the process; ours comes first."""


class Group(ABC):
    """The sender and all receivers. What goes wrong is raised as a `RuntimeError`."""

    @abstractmethod
    def memory(self, num_bytes: int) -> Tensor:
        """Flat uint8, where the group sends from and to."""

    @abstractmethod
    def broadcast(self, memory: Tensor, deadline: Deadline) -> Work:
        """Begin to send it from the sender to all others."""

    @abstractmethod
    def wait(self, work: Work, deadline: Deadline) -> None:
        """Until its memory may be read and written, and all that this process has begun to do with other memory is
        done."""

    @abstractmethod
    def all_done(self, deadline: Deadline) -> None:
        """Wait for every rank. A broadcast alone may end for the sender while its bytes are still on their way."""

    @abstractmethod
    def abort(self) -> None:
        """Give everything back, whatever is under way."""


def make_group(backend: str, device: str, store: Store, rank: int, size: int, host: str, deadline: Deadline) -> Group:
    """Met by all ranks. `host` is the sender's address, where gloo connects."""
    if backend == HOST_BACKEND:
        return HostGroup(store, rank, size, host, deadline)
    return DeviceGroup(backend, device, store, rank, size)


class HostGroup(Group):
    """gloo, which sees at once that a peer has hung up."""

    def __init__(self, store: Store, rank: int, size: int, host: str, deadline: Deadline) -> None:
        from torch.distributed import ProcessGroupGloo

        self._group: ProcessGroupGloo
        if host != LOOPBACK:
            self._group = ProcessGroupGloo(store, rank, size, timeout(deadline))
            return
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # The loopback device reaches nobody else; a sender that is met there has only receivers that are, too.
        options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timeout(deadline)
        self._group = ProcessGroupGloo(store, rank, size, options)

    @override
    def memory(self, num_bytes: int) -> Tensor:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8)

    @override
    def broadcast(self, memory: Tensor, deadline: Deadline) -> Work:
        work: Work = self._group.broadcast(memory, SENDER, timeout(deadline))  # type: ignore[attr-defined]
        return work

    @override
    def wait(self, work: Work, deadline: Deadline) -> None:
        work.wait(timeout(deadline))

    @override
    def all_done(self, deadline: Deadline) -> None:
        import torch
        from torch.distributed import AllreduceOptions

        options = AllreduceOptions()
        options.timeout = timeout(deadline)
        self._group.allreduce([torch.zeros(1)], options).wait(timeout(deadline))  # type: ignore[attr-defined]

    @override
    def abort(self) -> None:
        self._group.abort()


class DeviceGroup(Group):
    """A library that works beside the host, and that may not see that a peer is gone: the host waits for it, and looks
    meanwhile whether the publish was called off."""

    def __init__(self, backend: str, device: str, store: Store, rank: int, size: int) -> None:
        self._store, self._device = store, device
        with _watchdogs_off():
            self._group = _torch_group(backend, store, rank, size)

    @override
    def memory(self, num_bytes: int) -> Tensor:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    @override
    def broadcast(self, memory: Tensor, deadline: Deadline) -> Work:
        work: Work = self._group.broadcast(memory, SENDER, _NEVER)
        return work

    @override
    def wait(self, work: Work, deadline: Deadline) -> None:
        import torch

        asked = time.monotonic()
        while not work.is_completed():
            if deadline.left == 0:
                raise RuntimeError("the deadline passed")
            if time.monotonic() - asked >= ASK_S:
                asked = time.monotonic()
                if self._store.check([OFF]):
                    raise RuntimeError("the publish was called off")
            time.sleep(LOOK_S)
        work.wait(timeout(deadline))  # is over, but raises what went wrong; nccl only where a timeout is given
        torch.get_device_module(torch.device(self._device).type).synchronize()

    @override
    def all_done(self, deadline: Deadline) -> None:
        import torch
        from torch.distributed import AllreduceOptions

        options = AllreduceOptions()
        options.timeout = _NEVER
        self.wait(self._group.allreduce([torch.zeros(1, device=self._device)], options), deadline)

    @override
    def abort(self) -> None:
        self._group.abort()


def call_off(address: str) -> None:
    """Tell ends that the publish has failed. By the driver; where it cannot reach the store, both wait for their
    deadline."""
    from torch.distributed import DistError

    try:
        with closing(connect(address, timedelta(seconds=ASK_S))) as store:
            store.set(OFF, "")
    except DistError:  # the sender is gone, which receivers see for themselves
        return


def connect(address: str, within: timedelta) -> RemoteStore:
    """The store of the sender at `address`. Raises `DistError`."""
    from roll_core.runtime.weights.transports.store import RemoteStore

    secret, _, where = address.partition("@")
    host, _, port = where.rpartition(":")
    return RemoteStore(host, int(port), secret, within)


def timeout(deadline: Deadline) -> timedelta:
    """What is left of it, for calls to which 0 would mean something else."""
    return timedelta(seconds=max(deadline.left, 1e-3))


@contextmanager
def _watchdogs_off() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in WATCHDOGS}
    os.environ.update(dict.fromkeys(WATCHDOGS, "0"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _torch_group(backend: str, store: Store, rank: int, size: int) -> Any:
    """A group of one of torch's own backends, or of one that a package has registered with it. torch's public calls
    make groups only within the default one."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _DistributedBackendOptions  # type: ignore[attr-defined]

    own = getattr(dist, f"ProcessGroup{backend.upper()}", None)
    if own is not None:
        options = own.Options()
        options._timeout = _NEVER
        return own(store, rank, size, options)
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        raise UnsupportedError(f"this torch has no collective backend {backend}")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, _NEVER)
    described = _DistributedBackendOptions()
    described.store = store
    described.group_rank, described.group_size = rank, size
    described.timeout = _NEVER
    described.group_id = "roll-weights"
    described.global_ranks_in_group = []
    return plugin.creator_fn(described, None)
