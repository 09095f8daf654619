"""The contract of train strategies, at every stage of ZeRO. Without DeepSpeed only what needs none of it runs."""

from __future__ import annotations

from typing import Any

import pytest

from roll_core.testing import TrainStrategyConformance


def stage(number: int, **keys: Any) -> dict[str, Any]:
    # Nothing is small enough to stay whole on every rank, so that everything is cut that a large model would cut.
    small = {"stage3_param_persistence_threshold": 0} if number == 3 else {}
    return {"zero_optimization": {"stage": number, **small, **keys}}


HOST = {"device": "cpu", "pin_memory": False}


class TestZero3(TrainStrategyConformance):
    """Where most can go wrong: everything is spread, and ranks need each other in every pass."""

    name = "deepspeed_train"
    variants = {"zero3": stage(3)}  # noqa: RUF012
    environment = {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}  # noqa: RUF012
    preload = (
        "transformers.models.qwen3.modeling_qwen3",
        "safetensors.torch",
        "deepspeed",
    )


@pytest.mark.slow
class TestZero0To2(TrainStrategyConformance):
    """The other stages; `-m "not slow"` leaves them out."""

    name = "deepspeed_train"
    variants = {f"zero{number}": stage(number) for number in range(3)}  # noqa: RUF012
    environment = TestZero3.environment
    preload = TestZero3.preload


@pytest.mark.slow
class TestOffload(TrainStrategyConformance):
    """What is offloaded lives in the host's memory: which is where the tests' device is, so only numbers can differ."""

    name = "deepspeed_train"
    variants = {  # noqa: RUF012
        "zero2-offload": stage(2, offload_optimizer=HOST),
        "zero3-offload": stage(3, offload_optimizer=HOST, offload_param=HOST),
    }
    environment = TestZero3.environment
    preload = TestZero3.preload
