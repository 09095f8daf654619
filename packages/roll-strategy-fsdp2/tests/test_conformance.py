"""The conformance kit of `roll_testing`: a few tests on two ranks here, all in CI; with `./run test-engines fsdp2` on
every arrangement of ranks, which is slow. In CI, `test_numbers` compares each arrangement with `hf_train`, and
`test_state` resumes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
from fsdp2_programs import ENVIRONMENT, MOE, PRELOAD

from roll_testing import TrainStrategyConformance
from roll_testing.models import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from roll_core.spec.model import ModelSpec
    from roll_core.spec.providers import Task

beside_the_engine = pytest.mark.engine


@pytest.mark.brief(ci=True)
class TestFSDP2(TrainStrategyConformance):
    """Two ranks that share a model, and one where a test takes no more."""

    name = "fsdp2_train"
    world_sizes = (2,)
    environment = ENVIRONMENT
    preload = PRELOAD


@beside_the_engine
class TestInfer(TrainStrategyConformance):
    """The twin that only scores."""

    name = "fsdp2_infer"
    environment = ENVIRONMENT
    preload = PRELOAD


@beside_the_engine
@pytest.mark.slow
class TestArrangements(TrainStrategyConformance):
    """Ranks that compute every sequence together, copies of the model, and checkpoints that are written meanwhile.

    Two ranks with "tensor 2" are in `test_numbers` and `test_state`.
    """

    name = "fsdp2_train"
    variants: ClassVar = {
        "one": {},
        "2 x 2": {"fsdp_size": 2, "async_save_ckpt": True},
        "tensor 2": {"tensor_model_parallel_size": 2, "async_save_ckpt": True},
        "ulysses 2": {"ulysses_size": 2},
        "ring 2": {"ring_size": 2},
    }
    ranks_of: ClassVar = {"one": (1,), "2 x 2": (4,), "tensor 2": (4,), "ulysses 2": (2,), "ring 2": (2,)}
    parallelism: ClassVar = {"tensor_parallel": "tensor 2", "context_parallel": "ulysses 2"}
    environment = ENVIRONMENT
    preload = PRELOAD


@beside_the_engine
@pytest.mark.slow
class TestExperts(TrainStrategyConformance):
    """Two pairs of ranks with half of the experts each. One pair is in `test_numbers` and `test_router_replay`."""

    name = "fsdp2_train"
    variants: ClassVar = {"one": {}, "experts 2": {"ep_size": 2}}
    ranks_of: ClassVar = {"one": (1,), "experts 2": (4,)}
    parallelism: ClassVar = {"expert_parallel": "experts 2"}
    environment = ENVIRONMENT
    preload = PRELOAD

    def model(self, task: Task, folder: Path) -> ModelSpec:
        """A mixture."""
        mixture = {key: value for key, value in MOE.items() if key != "vocab_size"}
        return write_checkpoint(folder, mixture, task=task, vocab_size=self.vocab_size)
