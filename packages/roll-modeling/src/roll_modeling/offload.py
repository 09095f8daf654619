"""Offload of a rank's tensors to the host between phases, and copies of them there.

The memory behind tensors is moved, not the tensors. Engines keep views of one buffer in many places (ZeRO's partitions,
the padded shards of FSDP). All views remain valid. Their memory is freed while offloaded and has the same content when
it is back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from roll_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor, UntypedStorage

    from roll_core.spec.train import StateKind


Key = TypeVar("Key")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEEP_BELOW = 32 << 20
"""Size in bytes above which an allocation gets a mapping of its own; the maximum that glibc accepts."""


@dataclass(slots=True)
class OffloadedStorage:
    """Freed device memory, and its copy on the host (None for memory of zeros, and for scratch memory)."""

    storage: UntypedStorage
    num_bytes: int
    host: UntypedStorage | None


class Offloader:
    """Offloads and onloads the state of one rank, by part."""

    def __init__(self, role: str, device: torch.device) -> None:
        self._role, self._device = role, device
        self._offloaded: dict[StateKind, list[OffloadedStorage]] = {}

    def offload(self, part: StateKind, tensors: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> None:
        """Offload the device memory of `tensors`, and drop that of `scratch`.

        Gradients of zeros, as after an optimizer step, are not copied. Memory that is not on the device is skipped.
        Does nothing if the part is already offloaded.
        """
        if part in self._offloaded:
            return
        pin = self._device.type != "cpu"
        freed = self._offloaded.setdefault(part, [])
        for storage in filter(self._can_offload, storages(tensors)):
            host = None
            if part != "grads" or bool(_as_numbers(storage).any()):
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin).untyped_storage()
                host.copy_(storage)
            freed.append(OffloadedStorage(storage, storage.nbytes(), host))
            storage.resize_(0)
        for storage in filter(self._can_offload, storages(scratch)):
            freed.append(OffloadedStorage(storage, storage.nbytes(), None))
            storage.resize_(0)
        release_cached(self._device)

    def onload(self, part: StateKind) -> None:
        """Copy an offloaded part back to the device. Idempotent."""
        for each in self._offloaded.pop(part, ()):
            each.storage.resize_(each.num_bytes)
            if each.host is not None:
                each.storage.copy_(each.host)
            else:
                _as_numbers(each.storage).zero_()

    def has(self, part: StateKind) -> bool:
        """True if `part` is offloaded."""
        return part in self._offloaded

    def need(self, *parts: StateKind) -> None:
        """Raise `UnsupportedError` if one of `parts` is offloaded and thus not available for computation."""
        missing = [part for part in parts if part in self._offloaded]
        if missing:
            raise UnsupportedError(f"role {self._role}: {' and '.join(missing)} are offloaded; call onload first")

    def _can_offload(self, storage: UntypedStorage) -> bool:
        """True if the storage can be offloaded. Memory-mapped files cannot be resized, and use no private memory."""
        return storage.device.type == self._device.type and storage.resizable()


def _as_numbers(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Distinct storages of `tensors`, which may be views of one buffer."""
    seen: set[int] = set()
    for each in tensors:
        storage = each.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def host_copies(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Copy tensors to the host (pinned, if they are on a device), and wait until the copies are complete."""
    copies: dict[Key, Tensor] = {}
    sources: set[torch.device] = set()
    for key, tensor in tensors.items():
        away = tensor.device.type != "cpu"
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=away)
        copies[key] = copy.copy_(tensor.detach(), non_blocking=away)
        if away:
            sources.add(tensor.device)
    for device in sources:  # without an argument, torch waits only for the calling thread's current device
        torch.accelerator.synchronize(device)
    return copies


def release_cached(device: torch.device) -> None:
    """Return freed memory of the device to its driver, so that other processes can allocate it.

    torch's allocator otherwise keeps it for the next tensor of this process. Does nothing on the host.
    """
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Total size of the storages of `tensors`, in bytes."""
    return sum(each.nbytes() for each in storages(tensors))


def keep_freed_memory() -> None:
    """Keep freed memory in the process for the next allocation of up to `KEEP_BELOW` bytes.

    By default glibc returns freed activations to the kernel, which must map and clear the same pages for the next
    microbatch; that takes up to a tenth of a training step on a CPU. Does nothing if the environment configures malloc
    (`MALLOC_…`, `GLIBC_TUNABLES`) or if the C library has no `mallopt`.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEEP_BELOW)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def release_pages(tensor: Tensor) -> int:
    """Release the pages that lie entirely inside the tensor's storage; returns their size in bytes.

    Their content is lost. The next write to a page allocates it again. Raises `OSError` if the kernel refuses, for
    example for locked memory.
    """
    storage = tensor.untyped_storage()
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= first:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"the memory of a tensor cannot be released: {os.strerror(number)}")
    return end - first
