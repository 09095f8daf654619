"""The conformance kit of `roll_core.testing` on both strategies' record."""

from __future__ import annotations

from roll_core.testing import TrainStrategyConformance


class TestFSDP2(TrainStrategyConformance):
    """One rank and two."""

    name = "fsdp2_train"
    preload = ("transformers.models.qwen3.modeling_qwen3", "roll_strategy_fsdp2.strategy")
