"""On a CPU: memory of keys and values that SGLang gives back when it is asked to.

SGLang's own means for that (torch_memory_saver) is for CUDA; on a CPU its `release_memory_occupation` drops the cache
and keeps the memory. Through SGLang's registry of hooks this follows it, in the processes that hold a cache.
"""

from __future__ import annotations

from typing import Any

from roll_modeling.host_memory import release_pages

AFTER = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation"
)
"""What it follows."""


def release(result: Any, manager: Any, request: Any) -> None:
    """Nothing runs, and nobody will read what the cache has."""
    pool = manager.scheduler.token_to_kv_pool_allocator.get_kvcache()
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        for each in getattr(pool, name, None) or ():
            release_pages(each)
