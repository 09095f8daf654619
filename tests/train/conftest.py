"""Small models and batches that several tests of training share."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec
from roll_core.types import TrainSequence
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.models import QWEN3

sys.path.append(str(Path(__file__).parent))  # ranks import replica_program by name

TINY = {**QWEN3, "vocab_size": 61}
LENGTHS = (5, 1, 9, 3, 12, 2)


@pytest.fixture(autouse=True)
def one_thread():
    """The models are far too small for more, and other tests may run beside these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny() -> dict:
    """A Qwen3 of two layers."""
    return dict(TINY)


@pytest.fixture
def build():
    """`build(task=..., dtype=..., training=..., config=..., random_init=...)`, a strategy; closed after the test."""
    built: list[HFTrainStrategy] = []

    def make(*, training=None, config=None, mesh=None, forward_only=False, **spec):
        spec.setdefault("random_init", TINY)
        if "path" in spec:
            del spec["random_init"]
        wanted = training or TrainingSpec(learning_rate=1e-2, num_steps=100)
        strategy = HFTrainStrategy(config or HFTrainConfig(), None if forward_only else wanted)
        strategy.build(ModelSpec(seed=spec.pop("seed", 3), **spec), mesh or MeshInfo(role="student"))
        built.append(strategy)
        return strategy

    yield make
    for strategy in built:
        strategy.close()


@pytest.fixture
def sequences() -> list[TrainSequence]:
    """Ragged, one of length 1, one without a token in the loss, and one of two tokens."""
    rng = np.random.default_rng(0)
    return [
        TrainSequence(
            id=f"s{i}",
            tokens=rng.integers(0, TINY["vocab_size"], length),
            loss_mask=np.arange(length) >= (length if i == 3 else max(1, min(2, length - 1))),
            returns=rng.normal(size=length).astype(np.float32),
            group=i // 2,
        )
        for i, length in enumerate(LENGTHS)
    ]
