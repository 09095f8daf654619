"""The transport `cuda_ipc`: a buffer on the device that trainer and engine share; weights never leave the device.

Each engine reads from the train rank on its own device, so there may be several senders, which export in step. The
buffer exists for one publish only: between publishes the device's memory belongs to others. The host waits until the
device has written a bucket before it announces it, and until the device has read it before it confirms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.errors import UnsupportedError, WeightSyncError
from roll_core.runtime.weights.transports.pool import OwnedBuffer, PooledReceiver, PooledSender, SharedBuffer
from roll_core.spec.transport import BufferSizes, Route, WeightTransport
from roll_core.weights.device_memory import device_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.spec.transport import Deadline, ReceiverSetup, RoleFacts, SenderSetup, WeightSizes
    from roll_core.weights.device_memory import DeviceMemory

BUCKET_BYTES = 256 << 20
"""Upper bound of a bucket, unless a tensor is larger: each costs the host two waits and a message."""


class CudaIpcTransport(WeightTransport):
    """Shares a device buffer between processes on the same device."""

    @override
    def available(self, sender: RoleFacts, receiver: RoleFacts) -> str | None:
        return sources_of(sender, receiver)[1]

    @override
    def routes(self, sender: RoleFacts, receiver: RoleFacts) -> Sequence[Route]:
        """One route with a self-test, since drivers and containers may refuse CUDA IPC."""
        return (Route(sources=sources_of(sender, receiver)[0], self_test=True),)

    @override
    def sender(self, setup: SenderSetup) -> CudaIpcSender:
        return CudaIpcSender(setup.receivers, setup.bucket_bytes, setup.device)

    @override
    def receiver(self, setup: ReceiverSetup) -> CudaIpcReceiver:
        return CudaIpcReceiver(setup.address, setup.rank, setup.bucket_bytes, setup.deadline, setup.device)

    @override
    def buffers(self, sizes: WeightSizes) -> BufferSizes:
        num_bytes = _buffer_bytes(min(sizes.total_bytes, max(BUCKET_BYTES, sizes.largest_bytes)))
        return BufferSizes(sender_bytes=num_bytes, receiver_bytes=0, formula="a buffer on the device")


def sources_of(sender: RoleFacts, receiver: RoleFacts) -> tuple[tuple[int, ...], str | None]:
    """For each receiver, the first train rank on its device that exports whole tensors. If a receiver has none, the
    reason is the second value, otherwise None. Devices are identified by host and UUID."""
    leaders: dict[tuple[str, str], int] = {}
    for rank, worker in enumerate(sender.workers):
        if worker.device.uuid and worker.device.leads:
            leaders.setdefault((worker.host, worker.device.uuid), rank)
    found = []
    for rank, worker in enumerate(receiver.workers):
        if not worker.device.uuid:
            return (), (
                f"rank {rank} of {receiver.role} loads weights on {worker.device.device}, whose memory cannot be"
                " shared between processes"
            )
        if (worker.host, worker.device.uuid) not in leaders:
            return (), f"no rank of {sender.role} exports whole tensors on the device of rank {rank} of {receiver.role}"
        found.append(leaders[worker.host, worker.device.uuid])
    return tuple(found), None


class CudaIpcSender(PooledSender):
    """Sending endpoint; owns the device buffer."""

    keeps_buffer = False

    def __init__(self, receivers: Sequence[int], bucket_bytes: int, device: str) -> None:
        self._kind, self._device = _kind_of(device), device
        super().__init__(receivers, min(bucket_bytes, BUCKET_BYTES))

    @override
    def buffer_bytes(self, largest: int) -> int:
        return _buffer_bytes(largest)

    @override
    def allocate(self, num_bytes: int) -> OwnedBuffer:
        self._kind.collect()
        try:
            return _OwnedDeviceMemory(self._kind, self._device, num_bytes)
        except RuntimeError as error:
            raise WeightSyncError(f"no {num_bytes} bytes for a bucket on {self._device}: {error}") from error


class CudaIpcReceiver(PooledReceiver):
    """Receiving endpoint; opens the sender's device buffer."""

    keeps_buffer = False

    def __init__(self, address: str, rank: int, bucket_bytes: int, deadline: Deadline, device: str) -> None:
        self._kind, self._device = _kind_of(device), device
        super().__init__(address, rank, min(bucket_bytes, BUCKET_BYTES), deadline)

    @override
    def open(self, num_bytes: int, handle: bytes, descriptors: Sequence[int]) -> SharedBuffer:
        try:
            return _OpenedDeviceMemory(self._kind, self._device, handle)
        except WeightSyncError:
            raise
        except RuntimeError as error:
            raise WeightSyncError(f"the sender's memory on {self._device} cannot be opened: {error}") from error


class _OpenedDeviceMemory(SharedBuffer):
    def __init__(self, kind: DeviceMemory, device: str, handle: bytes) -> None:
        self._kind, self._device = kind, device
        self.tensor = kind.open(handle, device)

    @override
    def synchronize(self) -> None:
        self._kind.settle(self._device)

    @override
    def close(self) -> None:
        self.tensor = self.tensor.new_empty(0)


class _OwnedDeviceMemory(OwnedBuffer):
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
            raise WeightSyncError(f"memory on {self._device} cannot be shared: {error}") from error

    @override
    def synchronize(self) -> None:
        self._kind.settle(self._device)

    @override
    def close(self) -> None:
        self.tensor = self.tensor.new_empty(0)
        self._kind.collect()


def _buffer_bytes(largest: int) -> int:
    """Two buckets, unless one tensor is larger than that: device memory costs more than waiting for that tensor."""
    return max(largest, min(2 * largest, 2 * BUCKET_BYTES))


def _kind_of(device: str) -> DeviceMemory:
    kind = device_memory(device)
    if kind is None:
        raise UnsupportedError(f"memory of the device {device} cannot be shared between processes")
    return kind
