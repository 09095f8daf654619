"""Optimizers besides AdamW: their steps, and the state that a checkpoint has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from roll_core.algorithms.losses import sft_objective
from roll_core.data.pack import pack
from roll_core.errors import ContractError, UnsupportedError
from roll_core.spec.train import TrainingSpec
from roll_modeling.optimizer import create_optimizer
from roll_testing.errors import raises_error

TRAINING = TrainingSpec(learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, num_steps=9, max_grad_norm=1.0)
BUILT_IN = "roll_core.algorithms.optimizers"


def rmsprop(parameters, training, alpha=0.9):
    return torch.optim.RMSprop(parameters.values(), lr=training.learning_rate, alpha=alpha, centered=True)


def first_half(parameters, training):
    return torch.optim.SGD(list(parameters.values())[:3], lr=training.learning_rate)


SPECS = {
    "sgd": replace(TRAINING, optimizer=f"{BUILT_IN}:sgd"),
    "muon": replace(TRAINING, optimizer=f"{BUILT_IN}:muon", optimizer_kwargs={"ns_steps": 3}),
    "own": replace(TRAINING, optimizer=f"{__name__}:rmsprop", optimizer_kwargs={"alpha": 0.8}),
}


def train(strategy, sequences, steps):
    stats = []
    for _ in range(steps):
        strategy.forward_backward(pack(sequences), sft_objective())
        stats.append(strategy.optimizer_step())
    return stats


def weights(strategy):
    return {name: tensor.clone() for name, tensor in strategy.export_weights()}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("dtype", "done"), [("fp32", 0), ("bf16", 3)])
def test_a_loaded_state_continues_bit_for_bit(build, sequences, tmp_path, name, dtype, done):
    straight = build(training=SPECS[name], dtype=dtype)
    train(straight, sequences, done)
    straight.save(tmp_path)
    expected = train(straight, sequences, 3)
    resumed = build(training=SPECS[name], dtype=dtype, seed=99)
    train(resumed, sequences, 1)
    resumed.load(tmp_path)
    assert train(resumed, sequences, 3) == expected
    ours, theirs = weights(resumed), weights(straight)
    assert all(torch.equal(ours[each], theirs[each]) for each in theirs)


def test_sgd_sums_decayed_gradients(build, sequences):
    spec = replace(SPECS["sgd"], optimizer_kwargs={"momentum": 0.5}, warmup_steps=0, lr_scheduler_type="constant")
    strategy = build(training=replace(spec, max_grad_norm=0.0))
    parameters = dict(strategy.model.named_parameters())
    expected = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    sums = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
    for _ in range(3):
        strategy.forward_backward(pack(sequences), sft_objective())
        for name, gradient in strategy.optimizer.grads.items():
            decay = 0.1 if gradient.ndim >= 2 else 0.0
            sums[name] = 0.5 * sums[name] + gradient + decay * expected[name]
            expected[name] = expected[name] - 1e-2 * sums[name]
        strategy.optimizer_step()
    for name, tensor in parameters.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-7)


def test_muon_orthogonalises_updates_of_hidden_matrices(build, sequences):
    spec = TrainingSpec(learning_rate=1e-2, num_steps=9, lr_scheduler_type="constant", optimizer=f"{BUILT_IN}:muon")
    strategy, adamw = build(training=spec), build(training=replace(spec, optimizer=""))
    before = {name: tensor.detach().clone() for name, tensor in strategy.model.named_parameters()}
    for each in (strategy, adamw):
        train(each, sequences, 1)
    others = dict(adamw.model.named_parameters())
    for name, tensor in strategy.model.named_parameters():
        update = before[name] - tensor
        if ".layers." in name and tensor.ndim == 2:
            # Newton-Schulz brings the singular values near 1; the update is 0.01 × 0.2 × sqrt(larger side) of that.
            values = torch.linalg.svdvals(update) / (1e-2 * 0.2 * max(tensor.shape) ** 0.5)
            rank = int((values > 0.1).sum())
            assert rank > 1
            assert values[:rank].max() < 1.4
            assert not torch.equal(tensor, others[name])
        else:
            torch.testing.assert_close(tensor, others[name])


def test_portable_states_need_adamw(build):
    strategy = build(training=SPECS["muon"])
    state = strategy.export_state()
    with raises_error(UnsupportedError):
        state.read(next(iter(state.shapes)))


def test_an_optimizer_of_some_parameters_is_refused(build):
    parameters = {str(number): torch.nn.Parameter(torch.ones(2)) for number in range(5)}
    with raises_error(ContractError, f"{__name__}:first_half", 3, 5):
        create_optimizer(parameters, replace(TRAINING, optimizer=f"{__name__}:first_half"))
