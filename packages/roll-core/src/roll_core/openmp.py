"""OpenMP's threads beside other programs, and where several threads of one process compute in turns.

A team of threads meets at the end of each of the thousands of small kernels of a step; a thread that is early spins.
If another program has taken a core, the late thread gets no core until spinning ends: GCC's OpenMP spins for
300,000 rounds, some milliseconds. `SPIN_ROUNDS` cover the gap between two kernels, so a quiet machine is as fast.

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
    from collections.abc import Callable, Mapping

SOFT = 1
"""`omp_pause_soft`: settings such as the number of threads stay."""

SPIN_ROUNDS = 3000
"""Some 50 to 150 microseconds, about the gap between two kernels. Beside one busy program, on two cores, steps of the
quick start then take twice as long, not 30 times."""
SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def environment(present: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process that computes: how long threads spin, as the user says or else `SPIN_ROUNDS`.

    GCC's OpenMP reads them once, when torch loads it.
    """
    given = {name: present[name] for name in SPIN_VARIABLES if name in present}
    return given or {"GOMP_SPINCOUNT": str(SPIN_ROUNDS)}


def wanted_threads(variables: Mapping[str, str]) -> int:
    """`OMP_NUM_THREADS`, of a list for nested regions the first; 0 where it is not given or no number of threads."""
    first = variables.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


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
