"""The built-in strategy keeps its own contract."""

from __future__ import annotations

from typing import ClassVar

from roll_testing import TrainStrategyConformance


class TestHF(TrainStrategyConformance):
    name = "hf_train"
    variants: ClassVar = {"async": {"async_save_ckpt": True}}
    preload = (*TrainStrategyConformance.preload, "roll_strategy_hf.train")


class TestHFInfer(TrainStrategyConformance):
    name = "hf_infer"
    preload = TestHF.preload
    isolate = False
