"""Environment variables of the server processes, by platform, each with its reason. The user's values have priority."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from roll_infer_sglang.registration import FORCED_BACKEND, ON_CPU

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables with options of PyTorch's allocator: by its old name, which takes precedence, and the new one."""
CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""Variable with the CPU cores of each engine process."""
SYSTEM = Path("/sys/devices/system")


def engine_environment(
    device: str, present: Mapping[str, str], *, num_threads: int, num_slots: int, rank: int = 0
) -> dict[str, str]:
    """Variables to set in addition to `present`, for an engine on `num_slots` slots of the type of `device`.

    `num_threads` is the number of CPU threads for all slots together (0: not set). `rank` is the rank of the worker.
    """
    defaults = {
        # SGLang reserves some tokens of its context length, so we pass a longer one than the model's. We enforce the
        # model's limit ourselves.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if device == "cpu":
        defaults["SGLANG_USE_CPU_ENGINE"] = "1"  # otherwise SGLang looks for an accelerator
        defaults[FORCED_BACKEND] = "pytorch"  # SGLang ignores `sampling_backend` on a CPU
        defaults[ON_CPU] = "1"
        if num_slots > num_numa_nodes():
            # SGLang assigns a NUMA node to each process, and does not start if there are too few.
            defaults[CORES] = cores_of_slots(usable_cores(), num_slots, num_threads, rank)
    variables = {name: value for name, value in defaults.items() if name not in present}
    if device == "cpu" and num_threads:
        # Overrides the worker's own value, which counts the threads of all its slots.
        variables["OMP_NUM_THREADS"] = str(max(1, num_threads // num_slots))
    for name in ALLOCATORS if device.startswith("cuda") else ():
        options = present.get(name, "").split(",")
        usable = [option for option in options if option.replace(" ", "").lower() != "expandable_segments:true"]
        if usable != options:
            # SGLang's memory pools are incompatible with expandable segments.
            variables[name] = ",".join(usable)
    return variables


def cores_of_slots(cores: Sequence[int], num_slots: int, num_threads: int, rank: int) -> str:
    """Cores of each slot in SGLang's format, such as `0,1|2,3`: as many cores per slot as it has threads.

    Workers get consecutive cores by `rank`, starting again at the first core if there are too few. `num_threads` is the
    number of threads for all slots; 0 means one per core.
    """
    cores_per_slot = max(1, (num_threads or len(cores)) // num_slots)
    first = rank * num_slots
    slots = (range((first + slot) * cores_per_slot, (first + slot + 1) * cores_per_slot) for slot in range(num_slots))
    return "|".join(",".join(str(cores[place % len(cores)]) for place in places) for places in slots)


def num_numa_nodes(system: Path = SYSTEM) -> int:
    """Number of NUMA nodes of this host; 1 if the system does not report it."""
    return len(list(system.glob("node/node[0-9]*"))) or 1


def usable_cores(system: Path = SYSTEM) -> list[int]:
    """CPU cores that this process may use, each as the number of its first usable hardware thread."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return [core for core in allowed if core == min(_siblings(core, system) & set(allowed))]


def _siblings(cpu: int, system: Path) -> set[int]:
    """Numbers of all hardware threads of the core of `cpu`; the system file lists them as `0,64` or `0-1`."""
    file = system / f"cpu/cpu{cpu}/topology/thread_siblings_list"
    if not file.exists():
        return {cpu}
    spans = [span.split("-") for span in file.read_text(encoding="ascii").strip().split(",")]
    return {cpu}.union(*(range(int(span[0]), int(span[-1]) + 1) for span in spans))
