"""The transport `shm`: a buffer of anonymous shared memory, small enough to stay in the processor's cache.

The memory has no name: receivers get its file descriptor over a Unix socket. So nothing stays in /dev/shm, whichever
process is killed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.spec.transport import BufferSizes, one_host
from roll_weight_transports.pool import PooledReceiver, PooledSender, PooledTransport, SharedMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roll_core.spec.transport import ReceiverSetup, RoleFacts, SenderSetup, WeightSizes

BUCKET_BYTES = 2 << 20
"""Upper bound of a bucket, unless a tensor is larger."""
BUFFER_BYTES = 16 << 20
"""Size of the buffer, unless two of the largest bucket are larger; it fits into a last-level cache."""


class ShmTransport(PooledTransport):
    """Shares host memory between processes of one host."""

    @override
    def available(self, sender: RoleFacts, receiver: RoleFacts) -> str | None:
        return None if one_host(sender, receiver) else "the workers are on different hosts"

    @override
    def sender(self, setup: SenderSetup) -> PooledSender:
        return PooledSender(setup, AnonymousMemory())

    @override
    def receiver(self, setup: ReceiverSetup) -> PooledReceiver:
        return PooledReceiver(setup, AnonymousMemory())

    @override
    def buffers(self, sizes: WeightSizes) -> BufferSizes:
        bucket = max(BUCKET_BYTES, sizes.largest_bytes)
        num_bytes = min(sizes.total_bytes + bucket, max(BUFFER_BYTES, 2 * bucket))
        return BufferSizes(sender_bytes=num_bytes, receiver_bytes=num_bytes, formula="shared memory", on="host")


class AnonymousMemory(SharedMemory):
    """Shared memory on the host, known to other processes only by its file descriptor."""

    bucket_bytes = BUCKET_BYTES
    keeps_buffer = True

    def __init__(self) -> None:
        self._descriptor = -1

    @override
    def buffer_bytes(self, largest: int) -> int:
        return max(BUFFER_BYTES, 2 * largest)

    @override
    def allocate(self, num_bytes: int) -> Tensor:
        self._descriptor = _anonymous_file()
        os.truncate(self._descriptor, num_bytes)
        return _map(self._descriptor, num_bytes)

    @override
    def share(self, buffer: Tensor) -> tuple[bytes, Sequence[int]]:
        return b"", [self._descriptor]

    @override
    def open(self, num_bytes: int, handle: bytes, descriptors: Sequence[int]) -> Tensor:
        return _map(descriptors[0], num_bytes)

    @override
    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _map(descriptor: int, num_bytes: int) -> Tensor:
    """The memory as a flat uint8 tensor. The mapping lives as long as a tensor on it."""
    import torch

    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _anonymous_file() -> int:
    """A file descriptor of shared memory without a name, or with a name that is already removed."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"roll-{os.getpid()}-weights")
    with tempfile.TemporaryFile(prefix=f"roll-{os.getpid()}-") as file:
        return os.dup(file.fileno())
