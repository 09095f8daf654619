"""Digests of weights computed during the copy, by a compiled kernel (`digests.cpp`, through ctypes).

`roll_core.spec.weights` defines digests and computes them in a separate pass. With a C++ compiler, this module computes
equal digests at about the cost of the copy.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.spec.weights import CHUNK_BYTES, leaves_of
from roll_kernels.extensions import Extension, declare

if TYPE_CHECKING:
    from roll_core.spec.weights import Bytes

EXTENSION = Extension(name="roll_digests", sources=(Path(__file__).with_name("digests.cpp"),), native=True)
SHORTEST_BYTES = 241
"""Minimum size of a chunk for the kernel. XXH3 hashes shorter inputs by other formulas, which the kernel lacks."""
LEAF_BYTES = 16


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Load the kernel, compiled on first use and cached on this machine. Raises `ExtensionError`."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    return declare(EXTENSION.load(), {"roll_copy_leaves": [pointer, pointer, size, size, pointer]})


def compiled_leaves_of(held: Bytes, source: Bytes | None) -> bytes:
    """Same as `roll_core.spec.weights.leaves_of`, with copy and hash in one pass. Raises `ExtensionError`."""
    if source is None:
        return leaves_of(held, None)  # without a copy, xxHash's own kernels are faster
    rest = len(held) % CHUNK_BYTES
    num_hashed = len(held) - (rest if rest < SHORTEST_BYTES else 0)
    leaves = ctypes.create_string_buffer(-(-num_hashed // CHUNK_BYTES) * LEAF_BYTES)
    library().roll_copy_leaves(held.ctypes.data, source.ctypes.data, num_hashed, CHUNK_BYTES, leaves)
    return leaves.raw + leaves_of(held[num_hashed:], source[num_hashed:])
