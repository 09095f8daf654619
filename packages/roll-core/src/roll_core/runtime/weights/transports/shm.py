"""The transport `shm`: a pool of anonymous shared memory, small enough to stay in the processor's cache.

The memory has no name: receivers get its file descriptor over the socket. So nothing can stay in /dev/shm, whoever is
killed when.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.runtime.weights.transports.pool import LentMemory, Memory, PooledReceiver, PooledSender

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roll_core.runtime.weights.plan import Deadline

PIPELINE_BYTES = 2 << 20
"""Buckets are no larger than this unless a tensor is."""
ROOM_BYTES = 16 << 20
"""Of the memory, or twice the largest bucket: what is under way fits into a last-level cache."""


class ShmSender(PooledSender):
    """Owns the memory."""

    keeps_memory = True

    def __init__(self, num_receivers: int, bucket_bytes: int) -> None:
        super().__init__(range(num_receivers), min(bucket_bytes, PIPELINE_BYTES))

    @override
    def room_bytes(self, largest: int) -> int:
        return max(ROOM_BYTES, 2 * largest)

    @override
    def lend(self, num_bytes: int) -> LentMemory:
        return _AnonymousMemory(num_bytes)


class ShmReceiver(PooledReceiver):
    """Maps the sender's memory."""

    keeps_memory = True

    def __init__(self, address: str, rank: int, bucket_bytes: int, deadline: Deadline) -> None:
        super().__init__(address, rank, min(bucket_bytes, PIPELINE_BYTES), deadline)

    @override
    def open(self, num_bytes: int, handle: bytes, descriptors: Sequence[int]) -> Memory:
        return _MappedMemory(descriptors[0], num_bytes)


class _MappedMemory(Memory):
    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.tensor = _map(descriptor, num_bytes)

    @override
    def close(self) -> None:
        self.tensor = self.tensor.new_empty(0)


class _AnonymousMemory(LentMemory):
    def __init__(self, num_bytes: int) -> None:
        self._descriptor = _anonymous_file()
        os.truncate(self._descriptor, num_bytes)
        self.tensor = _map(self._descriptor, num_bytes)

    @override
    def handle(self) -> tuple[bytes, Sequence[int]]:
        return b"", [self._descriptor]

    @override
    def close(self) -> None:
        self.tensor = self.tensor.new_empty(0)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _map(descriptor: int, num_bytes: int) -> Tensor:
    """The memory as a flat uint8 tensor. The mapping lives as long as the tensor, or one on it, does."""
    import torch

    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _anonymous_file() -> int:
    """A file descriptor of shared memory that has no name, or whose name is already gone."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"roll-{os.getpid()}-weights")
    with tempfile.TemporaryFile(prefix=f"roll-{os.getpid()}-") as file:
        return os.dup(file.fileno())
