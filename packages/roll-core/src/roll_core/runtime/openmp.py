"""OpenMP's threads where several threads of one process compute in turns, as the local executor's workers do.

GCC's OpenMP gives every thread that computes a team of its own and keeps it. As soon as the teams together have more
threads than there are cores, waiting teammates no longer spin but sleep, and each of the thousands of small kernels
of a step pays for waking them, although only one team has work. So a thread that has nothing to do gives its team back.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SOFT = 1
"""`omp_pause_soft`: settings such as the number of threads stay."""


def rest() -> None:
    """Give back the calling thread's team; its next parallel region makes a new one.

    Does nothing where torch is not loaded or computes with another OpenMP: LLVM's and Intel's share
    teams by themselves.
    """
    if "torch" in sys.modules:
        _pause()(SOFT)


@lru_cache(maxsize=1)
def _pause() -> Callable[[int], int]:
    try:
        loaded = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such list of what is loaded
        return _nothing
    if not hasattr(loaded, "GOMP_parallel") or hasattr(loaded, "kmp_set_blocktime"):
        return _nothing
    pause: Callable[[int], int] = getattr(loaded, "omp_pause_resource_all", _nothing)
    return pause


def _nothing(_kind: int) -> int:
    return 0
