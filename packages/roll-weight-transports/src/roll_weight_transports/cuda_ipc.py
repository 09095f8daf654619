"""The transport `cuda_ipc`: a buffer on the device that trainer and engine share; weights never leave the device.

Each engine reads from the train rank on its own device, so there may be several senders, which export in step. The
buffer exists for one publish only: between publishes the device's memory belongs to others. The host waits until the
device has written a bucket before it announces it, and until the device has read it before it confirms.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.errors import UnsupportedError, WeightSyncError
from roll_core.spec.transport import BufferSizes, Route
from roll_weight_transports.device_memory import device_memory
from roll_weight_transports.pool import PooledReceiver, PooledSender, PooledTransport, SharedMemory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from roll_core.spec.transport import ReceiverSetup, RoleFacts, SenderSetup, WeightSizes

BUCKET_BYTES = 256 << 20
"""Upper bound of a bucket, unless a tensor is larger: each costs the host two waits and a message."""


class CudaIpcTransport(PooledTransport):
    """Shares a device buffer between processes on the same device."""

    @override
    def available(self, sender: RoleFacts, receiver: RoleFacts) -> str | None:
        return sources_of(sender, receiver)[1]

    @override
    def routes(self, sender: RoleFacts, receiver: RoleFacts) -> Sequence[Route]:
        """One route with a self-test, since drivers and containers may refuse CUDA IPC."""
        return (Route(sources=sources_of(sender, receiver)[0], self_test=True),)

    @override
    def sender(self, setup: SenderSetup) -> PooledSender:
        return PooledSender(setup, IpcMemory(setup.device))

    @override
    def receiver(self, setup: ReceiverSetup) -> PooledReceiver:
        return PooledReceiver(setup, IpcMemory(setup.device))

    @override
    def buffers(self, sizes: WeightSizes) -> BufferSizes:
        num_bytes = _buffer_bytes(min(sizes.total_bytes, max(BUCKET_BYTES, sizes.largest_bytes)))
        return BufferSizes(sender_bytes=num_bytes, receiver_bytes=0, formula="a buffer on the device")


def sources_of(sender: RoleFacts, receiver: RoleFacts) -> tuple[tuple[int, ...], str | None]:
    """For each receiver, the first train rank on its device that exports whole tensors. If a receiver has none, the
    reason is the second value, otherwise None. Devices are identified by host and UUID."""
    leaders: dict[tuple[str, str], int] = {}
    for rank, worker in enumerate(sender.workers):
        if worker.device.uuid and worker.device.is_leader:
            leaders.setdefault((worker.host, worker.device.uuid), rank)
    sources = []
    for rank, worker in enumerate(receiver.workers):
        if not worker.device.uuid or device_memory(worker.device.device) is None:
            return (), (
                f"rank {rank} of {receiver.role} loads weights on {worker.device.device}, whose memory cannot be"
                " shared between processes"
            )
        if (worker.host, worker.device.uuid) not in leaders:
            return (), f"no rank of {sender.role} exports whole tensors on the device of rank {rank} of {receiver.role}"
        sources.append(leaders[worker.host, worker.device.uuid])
    return tuple(sources), None


class IpcMemory(SharedMemory):
    """Memory of a device, shared by handles of its runtime."""

    keeps_buffer = False

    def __init__(self, device: str) -> None:
        kind = device_memory(device)
        if kind is None:
            raise UnsupportedError(f"memory of the device {device} cannot be shared between processes")
        self._kind, self._device = kind, device
        self.bucket_bytes = BUCKET_BYTES

    @override
    def buffer_bytes(self, largest: int) -> int:
        return _buffer_bytes(largest)

    @override
    def allocate(self, num_bytes: int) -> Tensor:
        self._kind.collect()
        with _device_errors(f"cannot allocate {num_bytes} bytes for a bucket on {self._device}"):
            return self._kind.allocate(num_bytes, self._device)

    @override
    def share(self, buffer: Tensor) -> tuple[bytes, Sequence[int]]:
        with _device_errors(f"memory on {self._device} cannot be shared"):
            return self._kind.share(buffer), ()

    @override
    def open(self, num_bytes: int, handle: bytes, descriptors: Sequence[int]) -> Tensor:
        with _device_errors(f"the sender's memory on {self._device} cannot be opened"):
            return self._kind.open(handle, self._device)

    @override
    def synchronize(self) -> None:
        self._kind.synchronize(self._device)

    @override
    def release(self) -> None:
        self._kind.collect()


@contextmanager
def _device_errors(what: str) -> Iterator[None]:
    """Raise errors of the device's runtime as `WeightSyncError`."""
    try:
        yield
    except WeightSyncError:
        raise
    except RuntimeError as error:
        raise WeightSyncError(f"{what}: {error}") from error


def _buffer_bytes(largest: int) -> int:
    """Two buckets, unless one tensor is larger than that: device memory costs more than waiting for that tensor."""
    return max(largest, min(2 * largest, 2 * BUCKET_BYTES))
