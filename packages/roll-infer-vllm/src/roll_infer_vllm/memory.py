"""Memory estimate per slot of vLLM, with the formulas of docs/plan.md. Light: imports neither torch nor vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec import fp8
from roll_core.spec.plan import DTYPE_BYTES, MemoryItem
from roll_infer_vllm.config import VllmConfig
from roll_modeling.memory import engine_estimate, millions

if TYPE_CHECKING:
    from roll_core.spec.plan import MemoryEstimate, MemoryInput

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
    weights = _weights(question, config)
    cache = _cache(question, config, weights.num_bytes)
    by_bytes = question.on_host or config.kv_cache_memory_bytes is not None
    return engine_estimate(
        question,
        weights,
        cache,
        sleep_level=config.sleep_level,
        bucket_mib=config.bucket_mib,
        cache_size=("kv_cache_memory_bytes", cache[0])
        if by_bytes
        else ("gpu_memory_utilization", config.gpu_memory_utilization or UTILIZATION),
    )


def _weights(question: MemoryInput, config: VllmConfig) -> MemoryItem:
    """Part of a slot in the model, and in data-parallel copies of everything but the experts.

    In fp8 the layers' matrices take one byte per element, plus four bytes for the scale of each row, or of each block.
    Only the latter format includes experts.
    """
    size, layers = DTYPE_BYTES[question.dtype], question.model.layers
    slots, copies, weight_format = config.slots_per_worker(), config.data_parallel_size, config.weight_format()
    linears = [linear for layer in layers for linear in layer.linears]
    experts = sum(layer.experts for layer in layers)
    elements = 0 if weight_format == "dtype" else sum(linear.outputs * linear.inputs for linear in linears)
    scales, expert_bytes = 4 * sum(linear.outputs for linear in linears) if elements else 0, size * experts
    if weight_format == "fp8_per_block":
        blocks = sum(-(-linear.outputs // fp8.BLOCK) * -(-linear.inputs // fp8.BLOCK) for linear in linears)
        elements, scales = elements + experts, 4 * blocks + 4 * experts // fp8.BLOCK**2
        expert_bytes = round(experts * (1 + 4 / fp8.BLOCK**2))
    rest = question.model.parameters - elements
    num_bytes = elements + size * rest + scales
    formula = f"{size} × {millions(rest)}"
    if elements:
        formula = f"({millions(elements)} + {formula} + scales {scales >> 10} KiB)"
    if copies > 1:
        others = num_bytes - expert_bytes
        num_bytes += (copies - 1) * others
        formula = f"({formula} + {copies - 1} × {others >> 20} MiB outside of the experts)"
    return MemoryItem(what="weights", num_bytes=num_bytes // slots, formula=f"{formula} / {slots} slots")


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
