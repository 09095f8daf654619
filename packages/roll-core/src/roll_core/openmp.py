"""OpenMP thread settings: spinning on busy machines, and several computing threads in one process.

A team of threads synchronises at the end of each of the thousands of small kernels of a step. A thread that finishes
early spins. If another program has taken a core, the late thread gets no core until the spinning ends: GCC's OpenMP
spins for 300,000 rounds, some milliseconds. `SPIN_ROUNDS` rounds cover the gap between two kernels, so an idle machine
is equally fast.

GCC's OpenMP creates a persistent team for every thread that computes. Once the teams together have more threads than
there are cores, waiting threads sleep instead of spinning. Each small kernel then pays for waking them, although only
one team has work. Therefore a thread without work releases its team.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SOFT = 1
"""`omp_pause_soft`: keeps settings such as the number of threads."""

SPIN_ROUNDS = 3000
"""About 50 to 150 microseconds, the gap between two kernels. Next to one busy program on two cores, steps of the quick
start then take twice as long, not 30 times."""
SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def environment(present: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a compute process: spin settings from `present`, otherwise `SPIN_ROUNDS`.

    GCC's OpenMP reads them once, when torch loads it.
    """
    settings = {name: present[name] for name in SPIN_VARIABLES if name in present}
    return settings or {"GOMP_SPINCOUNT": str(SPIN_ROUNDS)}


def wanted_threads(variables: Mapping[str, str]) -> int:
    """Number of threads in `OMP_NUM_THREADS`, of a list for nested regions the first; 0 if missing or invalid."""
    first = variables.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def rest() -> None:
    """Release the calling thread's team. Its next parallel region creates a new one.

    Does nothing if torch is not loaded or uses another OpenMP: LLVM's and Intel's share teams between threads.
    """
    if "torch" in sys.modules:
        _pause()(SOFT)


@lru_cache(maxsize=1)
def _pause() -> Callable[[int], int]:
    try:
        loaded = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows cannot look up symbols of all loaded libraries
        return _nothing
    if not hasattr(loaded, "GOMP_parallel") or hasattr(loaded, "kmp_set_blocktime"):
        return _nothing
    pause: Callable[[int], int] = getattr(loaded, "omp_pause_resource_all", _nothing)
    return pause


def _nothing(_kind: int) -> int:
    return 0
