"""The contract of train strategies, at every stage of ZeRO. Without DeepSpeed only what needs none of it runs."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_ranks import ENVIRONMENT, PRELOAD

from roll_testing import TrainStrategyConformance


def stage(number: int, **keys: Any) -> dict[str, Any]:
    # Nothing is small enough to stay whole on every rank, so that everything is cut that a large model would cut.
    small = {"stage3_param_persistence_threshold": 0} if number == 3 else {}
    return {"zero_optimization": {"stage": number, **small, **keys}}


HOST = {"device": "cpu", "pin_memory": False}


class TestZero(TrainStrategyConformance):
    """Two ranks that share everything: weights, gradients and moments."""

    name = "deepspeed_train"
    variants = {"zero3": stage(3)}  # noqa: RUF012
    world_sizes = (2,)
    environment = ENVIRONMENT
    preload = PRELOAD


@pytest.mark.brief
class TestStages(TrainStrategyConformance):
    """One rank; and the stages that cut less: what is cut, and when ranks need each other, differs at each stage."""

    name = "deepspeed_train"
    variants = {f"zero{number}": stage(number) for number in (0, 1, 2, 3)}  # noqa: RUF012
    ranks_of = {"zero3": (1,)}  # noqa: RUF012
    environment = TestZero.environment
    preload = TestZero.preload


@pytest.mark.slow
class TestOffload(TrainStrategyConformance):
    """What is offloaded lives in the host's memory: which is where the tests' device is, so only numbers can differ.
    `-m "not slow"` leaves them out; test_strategy.py has some with the same settings."""

    name = "deepspeed_train"
    variants = {  # noqa: RUF012
        "zero2-offload": stage(2, offload_optimizer=HOST),
        "zero3-offload": stage(3, offload_optimizer=HOST, offload_param=HOST),
    }
    environment = TestZero.environment
    preload = TestZero.preload


@pytest.mark.brief
class TestInfer(TrainStrategyConformance):
    """The twin that only scores, with an engine (stage 3) and without."""

    name = "deepspeed_infer"
    variants = {"zero0": stage(0), "zero3": stage(3)}  # noqa: RUF012
    environment = TestZero.environment
    preload = TestZero.preload
