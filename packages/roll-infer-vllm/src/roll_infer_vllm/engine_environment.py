"""Environment variables of the engine's processes, by platform, each with its reason. What the user set wins."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Options of torch's allocator: the old name, and the one that wins over it."""


def engine_environment(
    device: str, present: Mapping[str, str], *, num_threads: int, num_slots: int, compiles: bool
) -> dict[str, str]:
    """What to set beside `present` for an engine on `num_slots` slots of the kind of `device`, with `num_threads` for
    them all; `compiles` is false where the engine was told not to."""
    wanted = {
        # Forked from a process with threads and open devices, the engine's processes would hang or crash.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Usage reports leave the machine; that is the user's to decide.
        "VLLM_NO_USAGE_STATS": "1",
        # A hundred lines at each start otherwise.
        "VLLM_LOGGING_LEVEL": "WARNING",
        # Our sampler fits the first model runner's, see `workarounds`.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if device == "cpu":
        # vLLM would bind its threads to cores that it takes for its own, and two replicas to the same ones.
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if device == "cpu" and not compiles:
        # Eager or not, vLLM compiles what ranks logprobs when the first are asked for: 10 s and more.
        wanted["TORCH_COMPILE_DISABLE"] = "1"
    found = {name: value for name, value in wanted.items() if name not in present}
    if device == "cpu" and num_threads:
        # Whatever the worker's own number is: that one is for all its slots.
        found["OMP_NUM_THREADS"] = str(max(1, num_threads // num_slots))
    for name in ALLOCATORS if device.startswith("cuda") else ():
        options = present.get(name, "").split(",")
        kept = [each for each in options if each.replace(" ", "").lower() != "expandable_segments:true"]
        if kept != options:
            # vLLM's own memory pools, from which an engine sleeps, and segments that grow exclude each other.
            found[name] = ",".join(kept)
    return found


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set them for processes that are started meanwhile; afterwards this process's are as they were."""
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
