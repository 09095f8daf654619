"""Sums of named terms: each has its own denominator, and rollouts weigh the same however they are cut into rows."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.algorithms.aggregate import Aggregation
from roll_core.algorithms.kl import approx_kl
from roll_core.algorithms.losses import (
    CrossEntropy,
    EntropyTerm,
    KLTerm,
    Objective,
    PolicyTerm,
    policy_objective,
    sft_objective,
)
from roll_core.builtin.plugin import roll_policy_losses
from roll_core.data.pack import count_totals, pack
from roll_core.errors import DataError, NonFiniteError, UnsupportedError
from roll_core.spec.algorithms import PolicyLossParams
from roll_core.spec.train import Comparison, LossOutput, TokenOutputs, WantedOutputs
from roll_core.types import TrainSequence
from roll_modeling.task_model import finite_loss
from roll_testing.errors import raises_error
from roll_testing.models import cut_rollouts

VOCABULARY = 11
WHOLE_ROLLOUTS = [each.name for each in roll_policy_losses() if each.whole_rollouts]
MODES = get_args(Aggregation)


class TinyModel(torch.nn.Module):
    """Logprob and entropy of each token from all tokens before it."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 8)
        self.head = torch.nn.Linear(8, VOCABULARY)

    def outputs(self, micro):
        logprobs, entropies = [], []
        for tokens in micro.tokens_T.split(list(micro.lengths)):
            before = self.embed(tokens).cumsum(0).roll(1, 0)
            all_LV = self.head(torch.tanh(before)).log_softmax(-1)
            logprobs.append(all_LV.gather(-1, tokens[:, None])[:, 0])
            entropies.append(-(all_LV.exp() * all_LV).sum(-1))
        return TokenOutputs(logprobs_T=torch.cat(logprobs), entropy_T=torch.cat(entropies))


def batch_of(seed, lengths, **fields):
    rng = np.random.default_rng(seed)
    batch = []
    for index, length in enumerate(lengths):
        mask = rng.random(length) < 0.6
        mask[0] = False
        noise = rng.normal(size=(3, length)).astype(np.float32)
        weights = (rng.random(length) * (rng.random(length) < 0.5)).astype(np.float32)
        weights[0] = 0
        batch.append(
            TrainSequence(
                id=f"r{index}",
                tokens=rng.integers(0, VOCABULARY, length),
                loss_mask=mask,
                group=index // 2,
                old_logprobs=-2.4 + 0.3 * noise[0],
                ref_logprobs=-2.4 + 0.3 * noise[1],
                advantages=noise[2],
                streams={"chosen": weights},
                **fields,
            )
        )
    return batch


def computed(objective, sequences, *, seed=0, max_sequences=None, max_length=9):
    """Objective, gradient and metrics, summed over microbatches."""
    torch.manual_seed(seed)
    model = TinyModel()
    total, metrics = 0.0, {}
    denominators = count_totals(sequences, max_length=max_length)
    for micro in pack(sequences, totals=denominators, max_sequences=max_sequences):
        out = objective(model.outputs(micro), micro)
        out.loss.backward()
        total += out.loss.item()
        for name, value in out.metrics.items():
            combine = max if name.endswith("/max") else min if name.endswith("/min") else float.__add__
            metrics[name] = combine(metrics[name], float(value)) if name in metrics else float(value)
    return total, torch.cat([each.grad.flatten() for each in model.parameters()]), metrics


# -- rollouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    max_sequences=st.none() | st.integers(1, 4),
)
def test_splitting_rollouts_into_rows_changes_no_result(mode, lengths, seed, max_sequences):
    objective = policy_objective(
        aggregation=mode, kl_coef=0.3, entropy_coef=0.2, terms={"nll": CrossEntropy(stream="chosen")}
    )
    batch = batch_of(seed, lengths)
    whole = computed(objective, batch, seed=seed)
    cut = computed(objective, cut_rollouts(batch, seed=seed), seed=seed, max_sequences=max_sequences)
    assert cut[0] == pytest.approx(whole[0], rel=1e-6, abs=1e-6)
    assert (cut[1] - whole[1]).norm() <= 1e-6 * whole[1].norm() + 1e-8
    assert cut[2] == pytest.approx(whole[2], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WHOLE_ROLLOUTS)
@pytest.mark.parametrize("max_sequences", [None, 1, 3])
def test_rows_of_a_rollout_in_one_microbatch_share_its_ratio(name, mode, max_sequences):
    options = {"gspo": {"clip_low": 0.2, "clip_high": 0.2}, "kl_cov": {"cov_threshold": 0.0}}
    options["clip_cov"] = {"cov_low": 0.0, "probability": 1.0}  # its random choice depends on the rows
    objective = policy_objective(
        policy_loss=f"roll_core.algorithms.policy_losses:{name}",
        params=PolicyLossParams(options=options.get(name, {})),
        aggregation=mode,
        kl_coef=0.3,
        entropy_coef=0.2,
    )
    batch = batch_of(0, [12, 9, 7, 11, 5])
    rows = cut_rollouts(batch, seed=1)
    assert len(rows) > len(batch)
    units = [replace(each, unit=each.rollout) for each in rows]
    whole, cut = computed(objective, batch), computed(objective, units, max_sequences=max_sequences)
    assert cut[0] == pytest.approx(whole[0], rel=1e-6, abs=1e-6)
    assert (cut[1] - whole[1]).norm() <= 1e-6 * whole[1].norm() + 1e-8
    assert cut[2] == pytest.approx(whole[2], rel=1e-4, abs=1e-6)
    with raises_error(DataError, "unit"):
        computed(objective, rows, max_sequences=1)


def by_token(mode, rows, outputs, *, kl_coef, entropy_coef, max_length):
    """The objective by a loop over rollouts, rows and tokens, as the formulas are written."""
    rollouts = {}
    for at, row in enumerate(rows):
        rollouts.setdefault(row.rollout, []).append(at)
    taking_part = [
        [(at, t) for at in found for t in range(len(rows[at])) if rows[at].loss_mask[t]] for found in rollouts.values()
    ]
    taking_part = [tokens for tokens in taking_part if tokens]
    num_tokens = sum(map(len, taking_part))
    loss = torch.zeros(())
    for tokens in taking_part:
        weight = {
            "token-mean": 1 / num_tokens,
            "seq-mean-token-sum": 1 / len(taking_part),
            "seq-mean-token-mean": 1 / len(taking_part) / len(tokens),
            "seq-mean-token-sum-norm": 1 / len(taking_part) / max_length,
        }[mode]
        for at, t in tokens:
            row, logprob, entropy = rows[at], outputs[at].logprobs_T[t], outputs[at].entropy_T[t]
            ratio = (logprob - float(row.old_logprobs[t])).exp()
            advantage = float(row.advantages[t])
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            kl = approx_kl(logprob, torch.tensor(row.ref_logprobs[t]), "k3")
            loss = loss + weight * (-surrogate + kl_coef * kl - entropy_coef * entropy)
    chosen = sum(float(row.streams["chosen"].sum()) for row in rows)
    for row, found in zip(rows, outputs, strict=True):
        for t, weight in enumerate(row.streams["chosen"]):
            loss = loss - 0.5 * float(weight) / (chosen or 1.0) * found.logprobs_T[t]
    return loss


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_rollouts_equal_a_loop_over_tokens(mode, seed):
    rows = cut_rollouts(batch_of(seed, [9, 2, 5, 12, 3]), seed=seed)
    objective = policy_objective(
        aggregation=mode,
        kl_coef=0.3,
        entropy_coef=0.2,
        terms={"nll": CrossEntropy(stream="chosen")},
        coefs={"nll": 0.5},
    )
    value, gradient, _ = computed(objective, rows, max_sequences=2)
    torch.manual_seed(0)
    model = TinyModel()
    outputs = [model.outputs(micro) for micro in pack(rows, max_sequences=1)]
    expected = by_token(mode, rows, outputs, kl_coef=0.3, entropy_coef=0.2, max_length=9)
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(
        gradient, torch.cat([each.grad.flatten() for each in model.parameters()]), rtol=1e-4, atol=1e-6
    )


# -- terms -------------------------------------------------------------------------------------------------------------


def test_the_likelihood_of_a_stream_by_hand(micro_of):
    # weights 1 and 3 of logprobs -1 and -2, one of them outside the loss mask: (1 + 6) / 4
    micro = micro_of([[0, 1, 0]])
    micro = replace(
        micro,
        streams={"chosen": torch.tensor([0.0, 1.0, 3.0])},
        totals=replace(micro.totals, streams={"chosen": 4.0}),
    )
    outputs = TokenOutputs(logprobs_T=torch.tensor([math.nan, -1.0, -2.0]))
    out = Objective(terms={"nll": CrossEntropy(stream="chosen")})(outputs, micro)
    assert out.loss.item() == pytest.approx(7 / 4)
    assert {name: float(value) for name, value in out.metrics.items()} == pytest.approx(
        {"chosen_nll": 7 / 4, "loss": 7 / 4}
    )


@pytest.mark.parametrize("coef", [0.5, 3.0])
def test_a_term_changes_neither_value_nor_gradient_of_the_others(coef):
    batch = batch_of(3, [7, 4, 9])
    policy, nll = policy_objective(kl_coef=0.1), CrossEntropy(stream="chosen")
    alone, extra = computed(policy, batch), computed(Objective(terms={"nll": nll}), batch)
    mixed = computed(policy_objective(kl_coef=0.1, terms={"nll": nll}, coefs={"nll": coef}), batch)
    assert mixed[0] == pytest.approx(alone[0] + coef * extra[0], rel=1e-6)
    torch.testing.assert_close(mixed[1], alone[1] + coef * extra[1], rtol=1e-5, atol=1e-7)
    assert mixed[2] == pytest.approx({**alone[2], **extra[2], "loss": mixed[0]}, rel=1e-5, abs=1e-7)
    # A stream of twice the weight is the same stream.
    doubled = [replace(each, streams={"chosen": 2 * each.streams["chosen"]}) for each in batch]
    assert computed(policy, doubled)[0] == alone[0]
    assert computed(Objective(terms={"nll": nll}), doubled)[0] == pytest.approx(extra[0], rel=1e-6)


def test_terms_with_coefficient_0_are_reported_but_not_trained():
    batch = batch_of(3, [7, 4, 9])
    alone = computed(sft_objective(), batch)
    objective = Objective(
        terms={"nll": CrossEntropy(), "entropy": EntropyTerm(), "chosen": CrossEntropy(stream="chosen")},
        coefs={"entropy": 0.0, "chosen": 0.0},
    )
    found = computed(objective, batch)
    assert found[0] == alone[0]
    assert torch.equal(found[1], alone[1])
    assert found[2].keys() == {"loss", "nll", "entropy", "chosen_nll"}
    assert objective.want == WantedOutputs(logprobs=True, entropy=True, entropy_grad=False, masked_only=True)


@dataclass(frozen=True)
class Margin:
    """A term of one's own: probability of the most likely token."""

    want = WantedOutputs(topk=2, gathered=True, hidden=True)

    def __call__(self, outputs, micro):
        best_T = outputs.topk_logprobs_TK[:, 0]
        return LossOutput(loss=(best_T * micro.loss_mask_T).sum() / micro.totals.tokens, metrics={"margin": 1.0})


def test_the_outputs_of_all_terms_are_wanted():
    objective = policy_objective(temperature=0.7, terms={"margin": Margin(), "nll": CrossEntropy(stream="x")})
    assert objective.want == WantedOutputs(
        logprobs=True,
        entropy=True,
        entropy_grad=False,
        topk=2,
        gathered=True,
        hidden=True,
        masked_only=False,
        temperature=0.7,
    )
    assert pickle.loads(pickle.dumps(objective)) == objective


@dataclass(frozen=True)
class Comparing:
    """A term that compares with the model of a head."""

    head: str

    @property
    def want(self):
        return WantedOutputs(comparison=Comparison(head=self.head, function=torch.sub))


def test_terms_that_compare_with_two_models_are_refused():
    one, same, other = Comparing("a"), Comparing("a"), Comparing("b")
    assert Objective(terms={"one": one, "same": same}).want.comparison == one.want.comparison
    with raises_error(UnsupportedError, "one", "other"):
        _ = Objective(terms={"one": one, "same": same, "other": other}).want


@pytest.mark.parametrize(
    ("terms", "coefs"), [({"nll": CrossEntropy()}, {"nl": 0.5}), ({"nll": CrossEntropy()}, {"nll": 0.0}), ({}, {})]
)
def test_coefficients_without_a_term_are_refused(terms, coefs):
    with raises_error(ValueError, *coefs):
        Objective(terms=terms, coefs=coefs)


def test_empty_stream_is_0_and_missing_stream_raises():
    batch = [replace(each, streams={"chosen": np.zeros(len(each), np.float32)}) for each in batch_of(1, [4, 3])]
    value, gradient, _ = computed(Objective(terms={"nll": CrossEntropy(stream="chosen")}), batch)
    assert (value, float(gradient.norm())) == (0.0, 0.0)
    with raises_error(DataError, "positive", "chosen"):
        computed(Objective(terms={"nll": CrossEntropy(stream="positive")}), batch)


@pytest.mark.parametrize("weight", [-1.0, math.nan])
def test_weights_of_a_stream_are_finite_and_not_negative(weight):
    (row,) = batch_of(1, [3])
    with raises_error(DataError, "r0", "chosen"):
        pack([replace(row, streams={"chosen": np.array([0, 1, weight], np.float32)})])


def test_non_finite_output_read_by_a_stream_is_named():
    row = TrainSequence(
        id="row/1",
        tokens=np.arange(3),
        loss_mask=np.array([False, True, False]),
        streams={"chosen": np.array([0, 0, 1], np.float32)},
    )
    outputs = TokenOutputs(logprobs_T=torch.tensor([0.0, -1.0, -math.inf]))
    (micro,) = pack([row])
    finite_loss(sft_objective(), TokenOutputs(logprobs_T=torch.tensor([math.nan, -1.0, 0.0])), micro)
    with raises_error(NonFiniteError, "token 2", "row/1"):
        finite_loss(
            Objective(terms={"policy": CrossEntropy(), "chosen": CrossEntropy(stream="chosen")}), outputs, micro
        )


def test_policy_objective_terms_behave_like_other_terms():
    batch = batch_of(5, [6, 3, 8])
    found = computed(policy_objective(kl_coef=0.1, entropy_coef=0.01), batch)
    same = computed(
        Objective(
            terms={"policy": PolicyTerm(), "kl": KLTerm(), "entropy": EntropyTerm()},
            coefs={"kl": 0.1, "entropy": -0.01},
        ),
        batch,
    )
    assert found[0] == same[0]
    assert torch.equal(found[1], same[1])
    assert found[2] == same[2]
