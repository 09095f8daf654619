"""Environment variables of the server's processes, by platform, each with its reason. What the user set wins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_infer_sglang.registration import HOST_CACHE, INSISTED_ON

if TYPE_CHECKING:
    from collections.abc import Mapping

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def engine_environment(device: str, present: Mapping[str, str], *, num_threads: int, num_slots: int) -> dict[str, str]:
    """What to set beside `present` for an engine on `num_slots` slots of the kind of `device`, with `num_threads` for
    them all."""
    wanted = {
        # SGLang keeps some tokens of each sequence back, so it is told a longer limit than the model's; ours is the
        # model's.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if device == "cpu":
        wanted["SGLANG_USE_CPU_ENGINE"] = "1"  # it would look for another device
        wanted[INSISTED_ON] = "pytorch"  # SGLang 0.5.20 overrules `sampling_backend` there
        wanted[HOST_CACHE] = "1"
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
