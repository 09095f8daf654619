"""Environment variables of the engine processes, by platform, each with its reason. The user's values have priority."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables with options of PyTorch's allocator: the old name, and the new one, which takes precedence."""


def engine_environment(
    device: str, present: Mapping[str, str], *, num_threads: int, num_slots: int, compiles: bool
) -> dict[str, str]:
    """Variables to set in addition to `present`, for an engine on `num_slots` slots of the type of `device`.

    `num_threads` is the number of CPU threads for all slots together (0: leave it unset). `compiles` is False if
    compilation is disabled.
    """
    defaults = {
        # Processes forked from a process with threads and open devices hang or crash.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Usage reports leave the machine; the user must opt in.
        "VLLM_NO_USAGE_STATS": "1",
        # The default level prints about a hundred lines at each start.
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if device == "cpu":
        # Otherwise vLLM binds its threads to fixed cores, and two replicas to the same ones.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if device == "cpu" and not compiles:
        # Even with enforce_eager vLLM compiles the ranking of logprobs at its first use, which takes 10 s or more.
        defaults["TORCH_COMPILE_DISABLE"] = "1"
    variables = {name: value for name, value in defaults.items() if name not in present}
    if device == "cpu" and num_threads:
        # Overrides the worker's own value, which counts the threads of all its slots.
        variables["OMP_NUM_THREADS"] = str(max(1, num_threads // num_slots))
    for name in ALLOCATORS if device.startswith("cuda") else ():
        options = present.get(name, "").split(",")
        usable = [option for option in options if option.replace(" ", "").lower() != "expandable_segments:true"]
        if usable != options:
            # vLLM's memory pools for sleep mode are incompatible with expandable segments.
            variables[name] = ",".join(usable)
    return variables


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context manager that sets environment variables for child processes, and restores the old values at exit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
