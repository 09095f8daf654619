"""Memory estimate per slot of SGLang, with the formulas of docs/plan.md. Light: imports neither torch nor SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.plan import DTYPE_BYTES, MemoryItem
from roll_infer_sglang.config import SglangConfig
from roll_modeling.memory import engine_estimate

if TYPE_CHECKING:
    from roll_core.spec.plan import MemoryEstimate, MemoryInput

HOST_TOKENS = 65_536
"""Default size of the KV cache on a CPU, in tokens; SGLang's own default takes most of the host's memory."""


def memory(question: MemoryInput) -> MemoryEstimate:
    """Memory per slot: weights and the whole KV cache, both allocated at the start.

    During sleep the engine releases the KV cache and, except on a CPU, the weights.
    """
    config = question.config
    if not isinstance(config, SglangConfig):
        raise TypeError(f"expected SglangConfig, got {type(config).__name__}")
    slots = config.tp_size or question.num_slots
    weights = MemoryItem.of("weights", DTYPE_BYTES[question.dtype], question.model.parameters, slots)
    tokens = config.max_total_tokens or HOST_TOKENS
    return engine_estimate(
        question,
        weights,
        _cache(question, config, weights.num_bytes, slots),
        sleep_level=config.sleep_level,
        bucket_mib=config.bucket_mib,
        cache_size=("max_total_tokens", tokens)
        if question.on_host
        else ("mem_fraction_static", config.mem_fraction_static),
    )


def _cache(question: MemoryInput, config: SglangConfig, weights: int, slots: int) -> tuple[int, str]:
    """Bytes of the KV cache, and the formula: `mem_fraction_static` less the weights, limited by `max_total_tokens`."""
    size, model = DTYPE_BYTES[question.dtype], question.model
    tokens = config.max_total_tokens or (HOST_TOKENS if question.on_host else None)
    of_tokens = None
    if tokens is not None:
        of_tokens = tokens * 2 * len(model.layers) * model.key_width * size // slots
        how = f"max_total_tokens {tokens} × 2 × {len(model.layers)} × {model.key_width} × {size} / {slots}"
        if question.on_host or question.slot_bytes is None:
            return of_tokens, how
    share = config.mem_fraction_static
    if question.slot_bytes is None:
        return 0, f"mem_fraction_static {share:g} of an unknown memory size, less the weights"
    left = max(0, int(share * question.slot_bytes) - weights)
    if of_tokens is not None and of_tokens < left:
        return of_tokens, how
    return left, f"mem_fraction_static {share:g} of the memory, less the weights"
