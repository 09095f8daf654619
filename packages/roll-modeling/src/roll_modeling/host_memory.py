"""Physical memory of a tensor on the host, given back without giving up the tensor."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def release_pages(tensor: Tensor) -> int:
    """Give the pages back that lie wholly inside of the tensor's storage, and return their bytes. What stood there is
    lost; it takes memory again where it is written to.

    Raises `OSError` where the kernel refuses, as for memory that is locked.
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
