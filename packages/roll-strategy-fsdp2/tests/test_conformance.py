"""The conformance kit of `roll_core.testing`."""

from __future__ import annotations

from typing import ClassVar

from fsdp2_programs import PRELOAD

from roll_core.testing import TrainStrategyConformance


class TestFSDP2(TrainStrategyConformance):
    """One rank and two; and ranks that compute every sequence together."""

    name = "fsdp2_train"
    variants: ClassVar = {
        "default": {},
        "tensor 2": {"tensor_model_parallel_size": 2},
        "ulysses 2": {"ulysses_size": 2},
    }
    ranks_of: ClassVar = {"tensor 2": (2, 4), "ulysses 2": (2,)}
    preload = PRELOAD
