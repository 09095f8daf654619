"""Environment variables of the server's processes, by platform, each with its reason. What the user set wins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from roll_infer_sglang.registration import HOST_CACHE, INSISTED_ON

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""Of each of the engine's processes."""
SYSTEM = Path("/sys/devices/system")


def engine_environment(
    device: str, present: Mapping[str, str], *, num_threads: int, num_slots: int, rank: int = 0
) -> dict[str, str]:
    """What to set beside `present` for an engine on `num_slots` slots of the kind of `device`, with `num_threads` for
    them all; `rank` is its worker's."""
    wanted = {
        # SGLang keeps some tokens of each sequence back, so it is told a longer limit than the model's; ours is the
        # model's.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if device == "cpu":
        wanted["SGLANG_USE_CPU_ENGINE"] = "1"  # it would look for another device
        wanted[INSISTED_ON] = "pytorch"  # SGLang 0.5.20 overrules `sampling_backend` there
        wanted[HOST_CACHE] = "1"
        if num_slots > num_numa_nodes():
            # SGLang gives each process a NUMA node, and does not start where there are fewer.
            wanted[CORES] = cores_of_slots(usable_cores(), num_slots, num_threads, rank)
    found = {name: value for name, value in wanted.items() if name not in present}
    if device == "cpu" and num_threads:
        # Whatever the worker's own number is: that one is for all its slots.
        found["OMP_NUM_THREADS"] = str(max(1, num_threads // num_slots))
    options = [each for each in present.get(ALLOCATOR, "").split(",") if each]
    kept = [each for each in options if not each.startswith("expandable_segments")]
    if device.startswith("cuda") and kept != options:
        # SGLang's own memory pools and segments that grow exclude each other.
        found[ALLOCATOR] = ",".join(kept)
    return found


def cores_of_slots(cores: Sequence[int], num_slots: int, num_threads: int, rank: int) -> str:
    """As SGLang reads it: to each slot as many cores as it has threads, after those of the workers before; from the
    first one again where there are too few. `num_threads` are for all slots, 0 for one on each core."""
    each = max(1, (num_threads or len(cores)) // num_slots)
    first = rank * num_slots
    slots = (range((first + slot) * each, (first + slot + 1) * each) for slot in range(num_slots))
    return "|".join(",".join(str(cores[at % len(cores)]) for at in places) for places in slots)


def num_numa_nodes(system: Path = SYSTEM) -> int:
    """Of this host; 1 where the system does not tell."""
    return len(list(system.glob("node/node[0-9]*"))) or 1


def usable_cores(system: Path = SYSTEM) -> list[int]:
    """By the number of the first of each core's hardware threads, of those that this process may use."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return [each for each in allowed if each == min(_siblings(each, system) & set(allowed))]


def _siblings(cpu: int, system: Path) -> set[int]:
    """Hardware threads of the same core, as `0,64` or `0-1`."""
    file = system / f"cpu/cpu{cpu}/topology/thread_siblings_list"
    if not file.exists():
        return {cpu}
    spans = [each.split("-") for each in file.read_text(encoding="ascii").strip().split(",")]
    return {cpu}.union(*(range(int(span[0]), int(span[-1]) + 1) for span in spans))
