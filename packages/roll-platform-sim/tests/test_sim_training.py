"""Training steps on a simulated device: what the host waits for, and what it learns afterwards."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from sim_process import on_devices

from roll_core.algorithms import policy_losses
from roll_core.algorithms.losses import policy_objective
from roll_core.data.pack import pack
from roll_core.errors import NonFiniteError
from roll_core.plugins.registry import load_registry
from roll_core.runtime.cluster.executors.base import Peers
from roll_core.runtime.cluster.placement import Place
from roll_core.runtime.workers.train import BatchLimits, TrainWorker
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.providers import TrainProvider
from roll_core.spec.train import TrainingSpec, WantedOutputs
from roll_core.types import TrainSequence
from roll_strategy_fsdp2.config import FSDP2Config
from roll_strategy_fsdp2.strategy import FSDP2Strategy
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.models import QWEN3
from roll_testing.ranks import free_port

TRAINING = TrainingSpec(learning_rate=1e-3, num_steps=9, max_grad_norm=1.0)
MODEL = ModelSpec(random_init={**QWEN3, "vocab_size": 61}, seed=0)
LENGTHS = (5, 3, 7, 2, 4, 6)
NAMES = ("ppo", "gspo", "clip_cov")
LOSSES = {name: policy_objective(policy_loss=f"{policy_losses.__name__}:{name}", kl_coef=0.1) for name in NAMES}


def sequences(**fields):
    """Rows with a stream that no loss reads and ids of no logprobs; `fields` replaces some of a row by its id."""
    rng = np.random.default_rng(0)
    names = ("advantages", "old_logprobs", "ref_logprobs")
    rows = [
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
    return [replace(row, **fields.get(row.id, {})) for row in rows]


def microbatches(**fields):
    """Three of two sequences each."""
    return pack(sequences(**fields), max_sequences=2)


def trainer():
    strategy = HFTrainStrategy(HFTrainConfig(), TRAINING)
    strategy.build(MODEL, MeshInfo(role="student", device="sim:0"))
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


def num_waits(trace):
    """Number of times that the host waited for a device."""
    return sum(num for event, num in trace.events.items() if event.kind == "wait" or "blocking" in event.what)


@on_devices()
@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_waits_twice_for_the_device(name):
    from roll_platform_sim.trace import Trace

    strategy = trainer()
    with Trace() as trace:
        metrics = strategy.forward_backward(microbatches(), LOSSES[name])
        strategy.optimizer_step()
    assert num_waits(trace) == 2, trace.lines()
    assert len(metrics) == 3
    assert all(math.isfinite(value) for each in metrics for value in each.values())
    assert (
        sum(number for event, number in trace.events.items() if "fused_adamw" in event.what) == 2
    )  # matrices, vectors


@pytest.fixture
def port():
    return free_port()


@on_devices(2)
def test_ranks_wait_twice_and_exchange_numbers_on_hosts(rank, port):
    """One rank has two microbatches, the other has one."""
    from roll_platform_sim.trace import Trace

    micros, loss = microbatches(), LOSSES["ppo"]
    whole, strategy = trainer(), FSDP2Strategy(FSDP2Config(), TRAINING)
    mesh = MeshInfo(role="student", rank=rank, world_size=2, device=f"sim:{rank}", backend="simccl", master_port=port)
    strategy.build(MODEL, mesh)
    for _ in range(2):
        whole.forward_backward(micros, loss)
        with Trace() as trace:
            strategy.forward_backward(micros[:2] if rank == 0 else micros[2:], loss)
            stats = strategy.optimizer_step()
        assert num_waits(trace) == 2, trace.lines()
        assert stats.grad_norm == pytest.approx(whole.optimizer_step().grad_norm, rel=1e-4)
    assert strategy.process_group.most([rank, -rank]) == [1, 0]
    strategy.process_group.wait()  # rank 0 serves the numbers until it closes
    strategy.close()


@on_devices()
@pytest.mark.parametrize("field", ["advantages", "old_logprobs"])
def test_a_loss_that_is_not_finite_is_named_after_the_passes(field):
    spoilt = np.array([0, 1, math.nan, 1, 1, 1, 1], np.float32)
    strategy = trainer()
    before = {name: tensor.clone() for name, tensor in strategy.export_weights()}
    with pytest.raises(NonFiniteError) as raised:
        strategy.forward_backward(microbatches(s2={field: spoilt}), LOSSES["ppo"])
    for part in (field, "token 2", "sequence s2"):
        assert part in str(raised.value)
    assert strategy.optimizer_step().grad_norm == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in strategy.export_weights())


def scoring_worker(device):
    worker = TrainWorker(
        place=Place(rank=0, world_size=1, device=device),
        peers=Peers(),
        role="reference",
        provider=load_registry().find(TrainProvider, "hf_train"),
        strategy_config={},
        training=None,
        model=MODEL,
        limits=BatchLimits(train_sequences=2, infer_sequences=2),
        backend="simccl",
        timeout_s=60,
        deterministic=True,
        owner="this test",
    )
    worker.start()
    return worker


@on_devices()
def test_scoring_waits_once_for_the_device():
    from roll_platform_sim.trace import Trace

    rows, want = sequences(), WantedOutputs(logprobs=True, entropy=True)
    expected = scoring_worker("cpu").score(rows, want)
    worker = scoring_worker("sim:0")
    with Trace() as trace:
        found = worker.score(rows, want)
    assert num_waits(trace) == 1, trace.lines()
    for name in ("logprobs", "entropy"):
        for one, other in zip(getattr(found, name), getattr(expected, name), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
