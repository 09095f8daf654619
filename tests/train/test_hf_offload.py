"""States that `hf_train` offloads free their device memory, and are equal after the onload."""

from __future__ import annotations

import pytest
import torch

from roll_core.algorithms.losses import sft_objective
from roll_core.data.pack import pack
from roll_core.errors import UnsupportedError
from roll_core.spec.train import TrainingSpec, WantedOutputs
from roll_modeling import offload
from roll_modeling.layout import adjacent
from roll_testing.errors import raises_error
from shared_tests.live_bytes import LiveBytes

TRAINING = TrainingSpec(learning_rate=1e-2, num_steps=9, max_grad_norm=1.0)
ALL = ("weights", "grads", "optimizer")


def step(strategy, sequences):
    strategy.forward_backward(pack(sequences), sft_objective())
    return strategy.optimizer_step()


def kept(strategy):
    """Bytes behind parameters, gradients and the optimizer's state, masters included, whoever says so."""
    parameters = list(strategy.model.parameters())
    tensors = [*parameters, *(each.grad for each in parameters if each.grad is not None)]
    for master, entry in strategy.optimizer.torch_optimizer.state.items():
        tensors += [master, master.grad, *entry.values()]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_nothing_is_left_where_it_was(build, sequences, dtype):
    strategy = build(training=TRAINING, dtype=dtype)
    step(strategy, sequences)
    numbers = sum(each.numel() for each in strategy.model.parameters())
    before = kept(strategy)
    assert before >= numbers * (16 if dtype == "fp32" else 18)
    strategy.offload(ALL)
    strategy.offload(ALL)
    assert kept(strategy) == 0
    assert sum(strategy.memory().values()) == 0
    strategy.onload(ALL)
    strategy.onload(ALL)
    assert kept(strategy) == before


def test_steps_after_an_onload_are_equal_bit_for_bit(build, sequences):
    """In bf16; the kit moves fp32 states."""
    moved, stayed = build(training=TRAINING, dtype="bf16"), build(training=TRAINING, dtype="bf16")
    step(moved, sequences), step(stayed, sequences)
    moved.forward_backward(pack(sequences), sft_objective())
    stayed.forward_backward(pack(sequences), sft_objective())
    moved.offload(ALL)
    moved.onload(ALL)
    assert moved.optimizer_step() == stayed.optimizer_step()
    assert step(moved, sequences) == step(stayed, sequences)
    pairs = zip(moved.export_weights(), stayed.export_weights(), strict=True)
    assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)


@pytest.mark.parametrize("accumulated", [False, True])
def test_gradients_are_copied_unless_they_are_zero(build, sequences, accumulated):
    strategy = build(training=TRAINING)
    step(strategy, sequences)
    if accumulated:
        strategy.forward_backward(pack(sequences), sft_objective())
    gradient = strategy.optimizer.flat_grad
    before = gradient.clone()
    with LiveBytes() as count:
        strategy.memory(), gradient.view(-1)  # counts tensors that exist already
        own = count.live
        strategy.offload(("grads",))
        copied = count.live - own
    assert copied == before.nbytes if accumulated else copied < 64
    strategy.onload(("grads",))
    assert torch.equal(gradient, before)


def test_an_arena_of_many_blocks_brings_back_every_byte(monkeypatch):
    monkeypatch.setattr(offload, "BLOCK_BYTES", 64)
    buffer = torch.arange(100, dtype=torch.float32)
    tensors = [
        buffer[:30],
        buffer[30:],
        torch.randn(7),
        torch.arange(3, dtype=torch.uint8),
        torch.randn(16),
        torch.zeros(9),
    ]
    before = [each.clone() for each in tensors]
    offloader = offload.Offloader("student", torch.device("cpu"))
    for part in ("optimizer", "grads", "optimizer"):
        offloader.offload(part, tensors, scratch=[scratch := torch.ones(5)])
        assert all(each.untyped_storage().nbytes() == 0 for each in [*tensors, scratch])
        offloader.onload(part)
        assert all(torch.equal(each, other) for each, other in zip(tensors, before, strict=True))
    assert scratch.untyped_storage().nbytes() == 20


def test_siblings_lie_side_by_side_as_before(build, sequences):
    strategy = build(training=TRAINING)
    strategy.offload(("weights",))
    strategy.onload(("weights",))
    attention = strategy.model.model.layers[0].self_attn
    assert adjacent([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None


def test_weights_alone_suffice_to_score_and_publish_not_to_train(build, sequences):
    strategy = build(training=TRAINING)
    step(strategy, sequences)
    (micro,) = pack(sequences)
    expected = strategy.forward(micro, WantedOutputs(logprobs=True)).logprobs_T
    exported = {name: each.clone() for name, each in strategy.export_weights()}
    strategy.offload(("grads", "optimizer"))
    assert torch.equal(strategy.forward(micro, WantedOutputs(logprobs=True)).logprobs_T, expected)
    assert all(torch.equal(each, exported[name]) for name, each in strategy.export_weights())
    with raises_error(UnsupportedError, "student", "grads"):
        strategy.forward_backward([micro], sft_objective())
    strategy.offload(("weights",))
    with raises_error(UnsupportedError, "student", "weights"):
        strategy.forward(micro, WantedOutputs(logprobs=True))
