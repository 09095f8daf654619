"""Host memory: what glibc's allocator keeps, and release of a tensor's pages while the tensor stays valid."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEEP_BELOW = 32 << 20
"""Size in bytes above which an allocation gets a mapping of its own; the maximum that glibc accepts."""


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
        raise OSError(number, f"the memory of a tensor cannot be given back: {os.strerror(number)}")
    return end - first
