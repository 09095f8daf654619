"""Training steps on a simulated device: what the host waits for, and what it learns afterwards."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from sim_process import on_devices

from roll_core.algorithms.losses import policy_objective
from roll_core.data.pack import pack
from roll_core.errors import NonFiniteError
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec
from roll_core.types import TrainSequence
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.models import QWEN3

LENGTHS = (5, 3, 7, 2, 4, 6)
LOSS = policy_objective(kl_coef=0.1, entropy_coef=0.01)


def microbatches(**fields):
    """Three of two sequences each, with a stream that no loss reads and ids of no logprobs."""
    rng = np.random.default_rng(0)
    names = ("advantages", "old_logprobs", "ref_logprobs")
    sequences = [
        TrainSequence(
            id=f"s{i}",
            tokens=rng.integers(3, 60, length),
            loss_mask=np.arange(length) > 0,
            streams={"weights": np.zeros(length, np.float32)},
            gather_ids=np.zeros((length, 0), np.int64),
            **{name: rng.normal(size=length).astype(np.float32) for name in names},
        )
        for i, length in enumerate(LENGTHS)
    ]
    return pack([replace(each, **fields.get(each.id, {})) for each in sequences], max_sequences=2)


def trainer():
    strategy = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=1e-3, num_steps=9, max_grad_norm=1.0))
    model = ModelSpec(random_init={**QWEN3, "vocab_size": 61}, seed=0)
    strategy.build(model, MeshInfo(role="student", device="sim:0"))
    return strategy


@on_devices()
def test_a_microbatch_moves_in_one_copy_that_does_not_block():
    from roll_platform_sim.trace import Trace

    (micro, *_) = microbatches()
    with Trace() as trace:
        moved = micro.to("sim:0")
    assert [(event.kind, event.what, number) for event, number in trace.events.items() if event.kind != "op"] == [
        ("h2d", "copy", 1)
    ]
    for each in fields(micro):
        given, found = getattr(micro, each.name), getattr(moved, each.name)
        if isinstance(given, torch.Tensor):
            assert (found.device.type, found.dtype) == ("sim", given.dtype)
            assert torch.equal(found.cpu(), given)
    assert torch.equal(moved.streams["weights"].cpu(), micro.streams["weights"])
    back = moved.to("cpu")
    assert torch.equal(back.tokens_T, micro.tokens_T)


@on_devices()
def test_a_training_step_waits_twice_for_the_device():
    from roll_platform_sim.trace import Trace

    strategy = trainer()
    with Trace() as trace:
        metrics = strategy.forward_backward(microbatches(), LOSS)
        strategy.optimizer_step()
    blocking = [event for event in trace.events if event.kind == "wait" or "blocking" in event.what]
    assert sum(trace.events[event] for event in blocking) == 2, trace.lines()
    assert len(metrics) == 3
    assert all(math.isfinite(value) for each in metrics for value in each.values())


@on_devices()
@pytest.mark.parametrize("field", ["advantages", "old_logprobs"])
def test_a_loss_that_is_not_finite_is_named_after_the_passes(field):
    spoilt = np.array([0, 1, math.nan, 1, 1, 1, 1], np.float32)
    strategy = trainer()
    before = {name: tensor.clone() for name, tensor in strategy.export_weights()}
    with pytest.raises(NonFiniteError) as raised:
        strategy.forward_backward(microbatches(s2={field: spoilt}), LOSS)
    for part in (field, "token 2", "sequence s2"):
        assert part in str(raised.value)
    assert strategy.optimizer_step().grad_norm == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in strategy.export_weights())
