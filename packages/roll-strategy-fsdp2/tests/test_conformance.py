"""The conformance kit of `roll_core.testing`: on one rank and two here, and for every arrangement of ranks with
`./run test-engines fsdp2`, which takes minutes. That each of them computes what `hf_train` computes is in
`test_numbers`, and that it continues in `test_state`."""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
from fsdp2_programs import PRELOAD

from roll_core.testing import TrainStrategyConformance

with_every_arrangement = pytest.mark.skipif(
    os.environ.get("ROLL_CONFORMANCE") != "full", reason="the kit for every arrangement: ./run test-engines fsdp2"
)


class TestFSDP2(TrainStrategyConformance):
    """One rank and two that share a model."""

    name = "fsdp2_train"
    preload = PRELOAD


@with_every_arrangement
class TestInfer(TrainStrategyConformance):
    """The twin that only scores."""

    name = "fsdp2_infer"
    preload = PRELOAD


@with_every_arrangement
class TestArrangements(TrainStrategyConformance):
    """Ranks that compute every sequence together, copies of the model, and checkpoints that are written meanwhile."""

    name = "fsdp2_train"
    variants: ClassVar = {
        "one": {},
        "2 x 2": {"fsdp_size": 2, "async_save_ckpt": True},
        "tensor 2": {"tensor_model_parallel_size": 2, "async_save_ckpt": True},
        "ulysses 2": {"ulysses_size": 2},
    }
    ranks_of: ClassVar = {"one": (1,), "2 x 2": (4,), "tensor 2": (2, 4), "ulysses 2": (2,)}
    parallelism: ClassVar = {"tensor_parallel": "tensor 2", "context_parallel": "ulysses 2"}
    preload = PRELOAD
