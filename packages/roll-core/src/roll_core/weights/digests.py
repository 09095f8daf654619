"""Digests of weights in the same pass as the copy, by a compiled kernel: `digests.cpp`, called through ctypes.

`roll_core.spec.weights` defines digests and computes them in a pass of their own; where there is a C++ compiler, this
computes the same ones at about the cost of the copy.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.errors import ExtensionError
from roll_core.native.extensions import Extension, declare
from roll_core.spec.weights import CHUNK_BYTES, leaves_of, take_leaves_from

if TYPE_CHECKING:
    from roll_core.spec.weights import Bytes

log = logging.getLogger(__name__)

EXTENSION = Extension(name="roll_digests", sources=(Path(__file__).with_name("digests.cpp"),), native=True)
SHORTEST_BYTES = 241
"""Shorter chunks are hashed by another formula of XXH3, which the kernel does not have."""
LEAF_BYTES = 16


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Compiled on first use, once for this machine. Raises `ExtensionError`."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    return declare(EXTENSION.load(), {"roll_copy_leaves": [pointer, pointer, size, size, pointer]})


def compiled_leaves_of(held: Bytes, source: Bytes | None) -> bytes:
    """`roll_core.spec.weights.leaves_of`, copying and hashing at once. Raises `ExtensionError`."""
    if source is None:
        return leaves_of(held, None)  # xxHash's own kernels are faster where nothing is copied
    rest = len(held) % CHUNK_BYTES
    whole = len(held) - (rest if rest < SHORTEST_BYTES else 0)
    leaves = ctypes.create_string_buffer(-(-whole // CHUNK_BYTES) * LEAF_BYTES)
    library().roll_copy_leaves(held.ctypes.data, source.ctypes.data, whole, CHUNK_BYTES, leaves)
    return leaves.raw + leaves_of(held[whole:], source[whole:])


@lru_cache(maxsize=1)
def use_compiled_digests() -> bool:
    """From here on this process takes leaves from the kernel, if it can be had. Compiles it where nobody has."""
    try:
        library()
    except ExtensionError as error:
        log.info("weights are digested in a pass of their own, more slowly: %s", error)
        return False
    take_leaves_from(compiled_leaves_of)
    return True
