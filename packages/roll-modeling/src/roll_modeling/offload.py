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
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, UntypedStorage

    from roll_core.spec.train import StateKind


Key = TypeVar("Key")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
BLOCK_BYTES = 64 << 20
"""Largest copy between host and device in bytes."""
KEEP_BELOW = 32 << 20
"""Size in bytes above which an allocation gets a mapping of its own; the maximum that glibc accepts."""


@dataclass(slots=True)
class OffloadedPart:
    """Freed device memory of a part, with sizes in bytes."""

    copied: list[tuple[UntypedStorage, int]]
    """In the order of their bytes in the arena."""
    zeros: list[tuple[UntypedStorage, int]]
    """Memory of zeros, and scratch memory, without a copy."""


class Offloader:
    """Offloads and onloads the state of one rank, by part.

    A part's bytes travel through blocks of pinned memory, its arena: one copy per block, and one wait per part. On a
    device the arena stays for the next phase, until `close`. On the host it exists only while the part is offloaded.
    """

    def __init__(self, role: str, device: torch.device) -> None:
        self._role, self._device = role, device
        self._on_host = device.type == "cpu"
        self._offloaded: dict[StateKind, OffloadedPart] = {}
        self._arenas: dict[StateKind, list[Tensor]] = {}

    def offload(self, part: StateKind, tensors: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> None:
        """Offload the device memory of `tensors`, and drop that of `scratch`.

        Gradients of zeros, as after an optimizer step, are not copied. Memory that is not on the device is skipped.
        Does nothing if the part is already offloaded.
        """
        if part in self._offloaded:
            return
        moved = [storage for storage in storages(tensors) if self._can_offload(storage)]
        dropped = [storage for storage in storages(scratch) if self._can_offload(storage)]
        if part == "grads" and moved:
            nonzero = torch.stack([_as_numbers(storage).any() for storage in moved]).tolist()
            dropped += [storage for storage, copied in zip(moved, nonzero, strict=True) if not copied]
            moved = [storage for storage, copied in zip(moved, nonzero, strict=True) if copied]
        freed = OffloadedPart(
            copied=[(storage, storage.nbytes()) for storage in moved],
            zeros=[(storage, storage.nbytes()) for storage in dropped],
        )
        for number, (pieces, complete) in enumerate(_blocks(moved)):
            block = self._block(part, number, sum(len(piece) for piece in pieces))
            if self._on_host:
                torch.cat(pieces, out=block)
                for storage in complete:
                    storage.resize_(0)
            else:
                block.copy_(pieces[0] if len(pieces) == 1 else torch.cat(pieces), non_blocking=True)
        self._offloaded[part] = freed
        self._wait()  # memory that another stream allocated may be reused there as soon as it is freed
        for storage in (*moved, *dropped):
            storage.resize_(0)
        release_cached(self._device)

    def onload(self, part: StateKind) -> None:
        """Copy an offloaded part back to the device. Idempotent."""
        freed = self._offloaded.pop(part, None)
        if freed is None:
            return
        for storage, size in (*freed.copied, *freed.zeros):
            storage.resize_(size)
        for storage, _ in freed.zeros:
            _as_numbers(storage).zero_()
        for number, (pieces, _) in enumerate(_blocks([storage for storage, _ in freed.copied])):
            sizes = [len(piece) for piece in pieces]
            block = self._block(part, number, sum(sizes))
            staged = block if self._on_host or len(pieces) == 1 else block.to(self._device, non_blocking=True)
            torch._foreach_copy_(pieces, list(torch.split(staged, sizes)), non_blocking=True)
        if self._on_host:
            self._arenas.pop(part, None)
        self._wait()

    def close(self) -> None:
        """Return all host memory. Parts that are offloaded are lost. Idempotent."""
        self._offloaded.clear()
        self._arenas.clear()
        release_pinned(self._device)

    def has(self, part: StateKind) -> bool:
        """True if `part` is offloaded."""
        return part in self._offloaded

    def need(self, *parts: StateKind) -> None:
        """Raise `UnsupportedError` if one of `parts` is offloaded and thus not available for computation."""
        missing = [part for part in parts if part in self._offloaded]
        if missing:
            raise UnsupportedError(f"role {self._role}: {' and '.join(missing)} are offloaded; call onload first")

    def _block(self, part: StateKind, number: int, num_bytes: int) -> Tensor:
        """Block of the part's arena, allocated if it does not exist or is too small."""
        arena = self._arenas.setdefault(part, [])
        if number == len(arena) or len(arena[number]) < num_bytes:
            arena[number:] = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=not self._on_host)]
        return arena[number][:num_bytes]

    def _wait(self) -> None:
        if not self._on_host:
            torch.accelerator.synchronize(self._device)

    def _can_offload(self, storage: UntypedStorage) -> bool:
        """True if the storage can be offloaded. Memory-mapped files cannot be resized, and use no private memory."""
        return storage.device.type == self._device.type and storage.resizable()


def _blocks(sources: Sequence[UntypedStorage]) -> Iterator[tuple[list[Tensor], list[UntypedStorage]]]:
    """The storages' bytes in order, in blocks of equal size: views of them, and the storages that end there.

    A block is at most an eighth of all bytes, because a device needs as much memory to join the pieces. Its size is a
    power of two, to which torch rounds pinned memory up.
    """
    total = sum(storage.nbytes() for storage in sources)
    block_bytes = min(BLOCK_BYTES, 1 << max(total.bit_length() - 4, 0))
    pieces: list[Tensor] = []
    complete: list[UntypedStorage] = []
    room = block_bytes
    for storage in sources:
        rest = _as_numbers(storage)
        while len(rest):
            pieces.append(rest[:room])
            rest = rest[room:]
            room -= len(pieces[-1])
            if not len(rest):
                complete.append(storage)
            if not room:
                yield pieces, complete
                pieces, complete, room = [], [], block_bytes
    if pieces:
        yield pieces, complete


def _as_numbers(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Distinct storages of `tensors`, which may be views of one buffer."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
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


def release_pinned(device: torch.device) -> None:
    """Return freed pinned memory to the system.

    Otherwise torch keeps it for later tensors of the process. Does nothing on the host, with versions of torch that
    cannot return it, and on devices of other packages (PrivateUse1): torch 2.13 crashes if they register no allocator.
    """
    release = getattr(torch.accelerator, "empty_host_cache", None)
    if release is not None and device.type not in ("cpu", torch._C._get_privateuse1_backend_name()):
        release()


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Total size of the storages of `tensors`, in bytes."""
    return sum(storage.nbytes() for storage in storages(tensors))


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
