"""Release of the KV cache's memory on a CPU.

SGLang's own mechanism (torch_memory_saver) supports only CUDA. On a CPU its `release_memory_occupation` clears the
cache but keeps the memory. A hook in SGLang's hook registry runs after it, in the processes that have a KV cache.
"""

from __future__ import annotations

from typing import Any

from roll_modeling.offload import release_pages

AFTER = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation"
)
"""SGLang method after which the hook `release` runs."""


def release(result: Any, manager: Any, request: Any) -> None:
    """Return the KV cache's memory pages to the operating system. No request is running; the content is lost."""
    pool = manager.scheduler.token_to_kv_pool_allocator.get_kvcache()
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        for each in getattr(pool, name, None) or ():
            release_pages(each)
