"""The conformance kit of `roll_core.testing`."""

from __future__ import annotations

from fsdp2_programs import PRELOAD

from roll_core.testing import TrainStrategyConformance


class TestFSDP2(TrainStrategyConformance):
    """One rank and two."""

    name = "fsdp2_train"
    preload = PRELOAD
