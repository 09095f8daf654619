"""Memory estimate per slot of vLLM, with the formulas of docs/plan.md. Light: imports neither torch nor vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.plan import MemoryEstimate, MemorySaving
from roll_infer_vllm.config import VllmConfig
from roll_modeling.memory import engine_uses, weight_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.plan import MemoryInput

UTILIZATION = 0.9
"""Assumed `gpu_memory_utilization` if it is not set."""
HOST_CACHE_BYTES = 4 << 30
"""Default size of the KV cache on a CPU, in bytes; vLLM's own default takes nearly all of the host's memory."""


def memory(question: MemoryInput) -> MemoryEstimate:
    """Memory per slot: weights, and a KV cache that fills the rest of the engine's share from the start.

    During sleep the engine releases the KV cache and, except on a CPU, the weights.
    """
    config = question.config
    if not isinstance(config, VllmConfig):
        raise TypeError(f"expected VllmConfig, got {type(config).__name__}")
    slots, copies = config.slots_per_worker(), config.data_parallel_size
    weights = weight_bytes(question, config.weight_format(), copies)[0] // slots
    cache, how = _cache(question, config, weights)
    return MemoryEstimate(
        uses=engine_uses(
            question,
            slots=slots,
            cache_bytes=cache,
            cache_formula=how,
            sleeps=config.sleep_level > 0,
            bucket_mib=config.bucket_mib,
            weight_format=config.weight_format(),
            copies=copies,
        ),
        savings=tuple(_savings(question, config, cache)),
    )


def _cache(question: MemoryInput, config: VllmConfig, weights: int) -> tuple[int, str]:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    share = config.gpu_memory_utilization
    if question.on_host and share is None:
        return HOST_CACHE_BYTES, "4 GiB, because neither kv_cache_memory_bytes nor gpu_memory_utilization is set"
    share = UTILIZATION if share is None else share
    if question.slot_bytes is None:
        return 0, f"gpu_memory_utilization {share:g} of an unknown memory size, less the weights"
    left = int(share * question.slot_bytes) - weights
    return max(0, left), f"gpu_memory_utilization {share:g} of the memory, less the weights"


def _savings(question: MemoryInput, config: VllmConfig, cache: int) -> Iterator[MemorySaving]:
    if question.on_host or config.kv_cache_memory_bytes is not None:
        for halvings in (1, 2, 3):
            keys = {"kv_cache_memory_bytes": cache >> halvings}
            yield MemorySaving(keys=keys, costs="fewer sequences are decoded together")
        return
    for share in (0.7, 0.5, 0.35, 0.2):
        if share < (config.gpu_memory_utilization or UTILIZATION):
            yield MemorySaving(keys={"gpu_memory_utilization": share}, costs="fewer sequences are decoded together")
