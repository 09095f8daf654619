"""The built-in strategy keeps its own contract."""

from __future__ import annotations

from roll_core.testing import TrainStrategyConformance


class TestHF(TrainStrategyConformance):
    name = "hf_train"
    variants = {"flat": {}, "chunked": {"logprob_chunk_tokens": 7, "fused": False}}  # noqa: RUF012
    world_sizes = (1, 2, 3)
