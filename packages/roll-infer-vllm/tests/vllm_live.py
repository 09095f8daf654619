"""A real engine with a small cache, beside the model of a trainer that publishes to it."""

from __future__ import annotations

from roll_infer_vllm.config import VllmConfig
from shared_tests.live_engine import Live

CACHE_BYTES = 4 << 20
CACHE = {"kv_cache_memory_bytes": CACHE_BYTES, "block_size": 32}


def start(spec, config=CACHE, kind=Live):
    """The engine, which the caller closes."""
    settings = VllmConfig.model_validate(config)
    return kind(strategy(settings), spec, num_slots=settings.slots_per_worker())


def strategy(settings):
    """Not started yet."""
    from roll_infer_vllm.strategy import VllmStrategy

    return VllmStrategy(settings)
