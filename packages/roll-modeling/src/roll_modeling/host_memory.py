"""Release of a host tensor's physical memory while the tensor itself stays valid."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
