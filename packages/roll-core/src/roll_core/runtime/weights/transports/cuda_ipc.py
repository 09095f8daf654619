"""The transport `cuda_ipc`: a pool of memory on the device that trainer and engine share, which no weight leaves.

Each engine reads from the trainer's rank on its own device, so there may be several senders, which export in step. The
memory is there for one publish: between two of them the device belongs to others. The host's part in it is to wait
until the device has written a bucket, before saying so, and has read it, before giving it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.errors import UnsupportedError, WeightSyncError
from roll_core.modeling.device_memory import device_memory
from roll_core.runtime.weights.transports.pool import LentMemory, Memory, PooledReceiver, PooledSender

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.modeling.device_memory import DeviceMemory
    from roll_core.runtime.weights.plan import Deadline

BUCKET_BYTES = 256 << 20
"""Buckets are no larger than this unless a tensor is: each costs the host two waits and a message."""


class CudaIpcSender(PooledSender):
    """Owns the memory."""

    keeps_memory = False

    def __init__(self, receivers: Sequence[int], bucket_bytes: int, device: str) -> None:
        self._kind, self._device = _kind_of(device), device
        super().__init__(receivers, min(bucket_bytes, BUCKET_BYTES))

    @override
    def room_bytes(self, largest: int) -> int:
        """For two buckets, unless a single tensor is larger: memory is dearer than the wait for that one."""
        return max(largest, min(2 * largest, 2 * BUCKET_BYTES))

    @override
    def lend(self, num_bytes: int) -> LentMemory:
        self._kind.collect()
        try:
            return _LentDeviceMemory(self._kind, self._device, num_bytes)
        except RuntimeError as error:
            raise WeightSyncError(f"no {num_bytes} bytes for a bucket on {self._device}: {error}") from error


class CudaIpcReceiver(PooledReceiver):
    """Opens the sender's memory."""

    keeps_memory = False

    def __init__(self, address: str, rank: int, bucket_bytes: int, deadline: Deadline, device: str) -> None:
        self._kind, self._device = _kind_of(device), device
        super().__init__(address, rank, min(bucket_bytes, BUCKET_BYTES), deadline)

    @override
    def open(self, num_bytes: int, handle: bytes, descriptors: Sequence[int]) -> Memory:
        try:
            return _OpenedDeviceMemory(self._kind, self._device, handle)
        except WeightSyncError:
            raise
        except RuntimeError as error:
            raise WeightSyncError(f"the sender's memory on {self._device} cannot be opened: {error}") from error


class _OpenedDeviceMemory(Memory):
    def __init__(self, kind: DeviceMemory, device: str, handle: bytes) -> None:
        self._kind, self._device = kind, device
        self.tensor = kind.open(handle, device)

    @override
    def settle(self) -> None:
        self._kind.settle(self._device)

    @override
    def close(self) -> None:
        self.tensor = self.tensor.new_empty(0)


class _LentDeviceMemory(LentMemory):
    def __init__(self, kind: DeviceMemory, device: str, num_bytes: int) -> None:
        self._kind, self._device = kind, device
        self.tensor = kind.allocate(num_bytes, device)

    @override
    def handle(self) -> tuple[bytes, Sequence[int]]:
        try:
            return self._kind.lend(self.tensor), ()
        except WeightSyncError:
            raise
        except RuntimeError as error:
            raise WeightSyncError(f"memory on {self._device} cannot be lent: {error}") from error

    @override
    def settle(self) -> None:
        self._kind.settle(self._device)

    @override
    def close(self) -> None:
        self.tensor = self.tensor.new_empty(0)
        self._kind.collect()


def _kind_of(device: str) -> DeviceMemory:
    kind = device_memory(device)
    if kind is None:
        raise UnsupportedError(f"memory of the device {device} cannot be lent to another process")
    return kind
