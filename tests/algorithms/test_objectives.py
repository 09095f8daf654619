"""Objectives: their numbers by hand, their metrics, and their indifference to how a batch is split."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.algorithms.losses import ValueObjective, policy_objective, sft_objective
from roll_core.errors import DataError, NonFiniteError
from roll_core.runtime.workers.train import combine
from roll_core.spec.algorithms import PolicyLossParams
from roll_core.spec.train import TokenOutputs
from roll_core.types import Totals
from roll_modeling.task_model import finite_loss, plain_metrics
from roll_testing.errors import raises_error

LN2 = math.log(2)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_the_policy_objective_adds_up_its_parts(micro_of):
    # two tokens, on policy: policy loss -(1) and -(-3): mean 1
    # KL by k3 with d = 0 and ln 2: 0 and 0.5 - 1 + ln 2: mean (ln 2 - 0.5)/2
    # entropy 0.3 and 0.5: mean 0.4
    micro = micro_of(
        [[0, 1, 1]],
        advantages=[[0, 1.0, -3.0]],
        old_logprobs=[[0, -1.0, -2.0]],
        ref_logprobs=[[0, -1.0, -2.0 - LN2]],
    )
    outputs = TokenOutputs(logprobs_T=torch.tensor([0.0, -1.0, -2.0]), entropy_T=torch.tensor([9.0, 0.3, 0.5]))
    objective = policy_objective(aggregation="token-mean", kl_coef=0.1, entropy_coef=0.01)
    out = objective(outputs, micro)
    kl = (LN2 - 0.5) / 2
    assert out.loss.item() == pytest.approx(1 + 0.1 * kl - 0.01 * 0.4, rel=1e-6)
    metrics = {name: float(value) for name, value in out.metrics.items()}
    assert metrics == pytest.approx(
        {
            "loss": out.loss.item(),
            "policy_loss": 1.0,
            "kl_loss": kl,
            "entropy": 0.4,
            "ratio": 1.0,
            "ratio/max": 1.0,
            "ratio/min": 1.0,
            "approx_kl": 0.0,
            "clipfrac": 0.0,
            "clipfrac_low": 0.0,
            "clipfrac_high": 0.0,
        },
        rel=1e-6,
    )


def test_masked_tokens_are_not_read(micro_of):
    off = math.nan
    micro = micro_of(
        [[0, 1]],
        advantages=[[off, 1.0]],
        old_logprobs=[[off, -1.0]],
        ref_logprobs=[[off, -1.0 - LN2]],
        behaviour_logprobs=[[off, -1.0]],
    )
    logprobs = torch.tensor([off, -1.0], requires_grad=True)
    entropy = torch.tensor([off, 0.5], requires_grad=True)
    out = policy_objective(kl_coef=1.0, entropy_coef=1.0)(TokenOutputs(logprobs_T=logprobs, entropy_T=entropy), micro)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-1 + (LN2 - 0.5) - 0.5)
    # policy loss: -1; k3's derivative in logprob, 1 - exp(-ln 2) = 0.5
    assert logprobs.grad.tolist() == pytest.approx([0, -0.5])
    assert entropy.grad.tolist() == [0, -1]


def test_engine_gap_is_reported_before_the_policy_changes(micro_of):
    behaviour = [[math.nan, -1.25, -2.5]]
    outputs = TokenOutputs(logprobs_T=torch.tensor([0.0, -1.0, -3.0]))
    advantages = [[0.0, 1.0, 1.0]]
    fresh = micro_of([[0, 1, 1]], advantages=advantages, behaviour_logprobs=behaviour)
    found = policy_objective(entropy_metric=False)(outputs, fresh).metrics
    assert float(found["logprob_gap"]) == pytest.approx((0.25 + 0.5) / 2)
    moved = micro_of([[0, 1, 1]], advantages=advantages, behaviour_logprobs=behaviour, old_logprobs=behaviour)
    assert "logprob_gap" not in policy_objective(entropy_metric=False)(outputs, moved).metrics


def test_only_required_outputs_are_requested():
    assert policy_objective(entropy_metric=False).want.entropy is False
    assert (policy_objective().want.entropy, policy_objective().want.entropy_grad) == (True, False)
    assert policy_objective(entropy_coef=0.01).want.entropy_grad is True
    assert policy_objective(temperature=0.7).want.temperature == 0.7
    assert (ValueObjective().want.values, ValueObjective().want.logprobs) == (True, False)
    assert (sft_objective().want.logprobs, sft_objective().want.entropy) == (True, False)


def test_an_entropy_that_is_only_reported_has_no_gradient(micro_of):
    entropy = torch.tensor([0.5], requires_grad=True)
    logprobs = torch.tensor([-1.0], requires_grad=True)
    outputs = TokenOutputs(logprobs_T=logprobs, entropy_T=entropy)
    policy_objective()(outputs, micro_of([[1]], advantages=[[1.0]])).loss.backward()
    assert entropy.grad is None


def test_the_entropy_bonus_raises_the_entropy(micro_of):
    entropy = torch.tensor([0.5, 0.7], requires_grad=True)
    outputs = TokenOutputs(logprobs_T=torch.tensor([-1.0, -1.0], requires_grad=True), entropy_T=entropy)
    micro = micro_of([[1, 1]], advantages=[[1.0, 1.0]])
    policy_objective(aggregation="token-mean", entropy_coef=0.1)(outputs, micro).loss.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05])


def test_a_policy_loss_is_loaded_by_name(micro_of):
    micro = micro_of([[1]], advantages=[[2.0]])
    outputs = TokenOutputs(logprobs_T=torch.tensor([-1.5]))
    by_name = policy_objective(policy_loss="roll_core.algorithms.policy_losses:vanilla", entropy_metric=False)
    assert by_name(outputs, micro).loss.item() == 3.0


@pytest.mark.parametrize("target", ["roll_core.algorithms.policy_losses:nothing", "no_such_module:f", "no colon"])
def test_a_policy_loss_that_is_not_there_is_named(target, micro_of):
    with raises_error(DataError, repr(target)):
        policy_objective(policy_loss=target, entropy_metric=False)(
            TokenOutputs(logprobs_T=torch.tensor([0.0])), micro_of([[1]], advantages=[[1.0]])
        )


def test_the_value_objective_by_hand(micro_of):
    # V 1, 4 against R 2, 2: 0.5 * (1 + 4) / 2 = 1.25
    micro = micro_of([[0, 1, 1]], returns=[[9, 2.0, 2.0]])
    out = ValueObjective()(TokenOutputs(values_T=torch.tensor([math.nan, 1.0, 4.0])), micro)
    assert out.loss.item() == pytest.approx(1.25)
    assert float(out.metrics["value"]) == pytest.approx(2.5)
    assert float(out.metrics["return"]) == pytest.approx(2.0)
    out = ValueObjective(coef=2.0)(TokenOutputs(values_T=torch.tensor([math.nan, 1.0, 4.0])), micro)
    assert out.loss.item() == pytest.approx(5.0)


def test_the_value_clip_by_hand(micro_of):
    # clip 0.5, old value 1, target 2. V = 1.2: within, 0.8² = 0.64 both ways.
    # V = 1.9: (0.1)² = 0.01, clipped to 1.5: 0.25 -> 0.25 and no gradient: it has gone far enough.
    # V = 4: 4, clipped to 1.5: 0.25 -> 4: too far on the wrong side, it must come back.
    micro = micro_of([[1, 1, 1]], returns=[[2.0] * 3], values=[[1.0] * 3])
    values = torch.tensor([1.2, 1.9, 4.0], requires_grad=True)
    out = ValueObjective(value_clip=0.5)(TokenOutputs(values_T=values), micro)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.5 * (0.64 + 0.25 + 4) / 3)
    assert float(out.metrics["value_clipfrac"]) == pytest.approx(1 / 3)
    assert values.grad.tolist() == pytest.approx([-0.8 / 3, 0, 2 / 3])


def test_the_share_of_clipped_values_does_not_count_rounding(micro_of):
    """Of 4,096 values none is beyond the clip range, then 64 are."""
    rng = torch.Generator().manual_seed(0)
    old, values, returns = torch.randn(3, 4096, generator=rng)
    values = torch.where((values - old).abs() < 1.9, values, old + 0.2)

    def value_clipfrac() -> float:
        micro = micro_of([[1] * 4096], returns=[returns.tolist()], values=[old.tolist()])
        out = ValueObjective(value_clip=2.0)(TokenOutputs(values_T=values), micro)
        return float(out.metrics["value_clipfrac"])

    assert value_clipfrac() == 0.0
    # At its target, too far from where it was: the clipped value's loss is the larger.
    values[:64] = returns[:64] = old[:64] + 3.0
    assert value_clipfrac() == pytest.approx(64 / 4096)


def test_the_sft_objective_by_hand(micro_of):
    # three tokens of response with probability 1/2, 1/4, 1/8: nll (1 + 2 + 3) ln 2 / 3 = 2 ln 2, perplexity 4
    micro = micro_of([[0, 1, 1], [0, 1]])
    out = sft_objective()(TokenOutputs(logprobs_T=torch.tensor([0, -LN2, -2 * LN2, 0, -3 * LN2])), micro)
    assert out.loss.item() == pytest.approx(2 * LN2)
    assert math.exp(float(out.metrics["nll"])) == pytest.approx(4)


def test_the_sft_objective_can_weigh_sequences_alike(micro_of):
    micro = micro_of([[0, 1, 1], [0, 1]])
    out = sft_objective(aggregation="seq-mean-token-mean")(
        TokenOutputs(logprobs_T=torch.tensor([0, -LN2, -2 * LN2, 0, -3 * LN2])), micro
    )
    assert out.loss.item() == pytest.approx((1.5 + 3) / 2 * LN2)
    assert float(out.metrics["nll"]) == pytest.approx(2 * LN2)


def test_token_accuracy_counts_argmax_tokens_in_the_mask(micro_of):
    # Of seven tokens five are learnt, and of these the model's first choice is right at the third, fourth and last.
    micro = replace(micro_of([[0, 1, 1], [0, 1, 1, 1]]), tokens_T=torch.tensor([4, 5, 6, 4, 7, 0, 9]))
    choices = torch.tensor([4, 6, 6, 4, 7, 1, 9])
    out = sft_objective(token_accuracy=True)(
        TokenOutputs(logprobs_T=-torch.ones(7), topk_ids_TK=choices[:, None], topk_logprobs_TK=-torch.ones(7, 1)), micro
    )
    assert float(out.metrics["token_accuracy"]) == pytest.approx(3 / 5)
    assert not out.metrics["token_accuracy"].requires_grad


def test_token_accuracy_of_a_microbatch_is_its_share_of_the_step(micro_of):
    # Counts of unequal microbatches add up to 4 of 6; their own shares would average to (1/1 + 3/5) / 2.
    whole = Totals(tokens=6, sequences=2, rollouts=2, groups=2, max_length=9)
    shares = []
    for mask, choices in (([0, 1], [0, 0]), ([0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1])):
        outputs = TokenOutputs(logprobs_T=torch.zeros(len(mask)), topk_ids_TK=torch.tensor(choices)[:, None])
        shares.append(sft_objective(token_accuracy=True)(outputs, micro_of([mask], totals=whole)).metrics)
    assert sum(float(each["token_accuracy"]) for each in shares) == pytest.approx(4 / 6)


def test_a_step_without_a_token_to_learn_has_an_accuracy_of_0(micro_of):
    outputs = TokenOutputs(logprobs_T=torch.zeros(2), topk_ids_TK=torch.zeros(2, 1, dtype=torch.int64))
    assert float(sft_objective(token_accuracy=True)(outputs, micro_of([[0, 0]])).metrics["token_accuracy"]) == 0.0


def test_token_accuracy_is_requested_only_if_configured():
    assert (sft_objective().want.topk, sft_objective(token_accuracy=True).want.topk) == (0, 1)


# -- hard cases --------------------------------------------------------------------------------------------------------

OBJECTIVES = [
    policy_objective(kl_coef=0.1, entropy_coef=0.01),
    policy_objective(
        policy_loss="roll_core.algorithms.policy_losses:vanilla", aggregation="token-mean", entropy_metric=False
    ),
    policy_objective(
        aggregation="seq-mean-token-sum", params=PolicyLossParams(pg_clip_high=0.4, dual_clip=3.0), kl_coef=0.1
    ),
    policy_objective(aggregation="seq-mean-token-sum-norm", entropy_coef=0.1),
    ValueObjective(value_clip=0.2),
    ValueObjective(aggregation="seq-mean-token-mean"),
    sft_objective(),
    sft_objective(aggregation="seq-mean-token-mean"),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_survive_pickling(objective):
    assert pickle.loads(pickle.dumps(objective)) == objective


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_empty_mask_gives_zero_and_a_gradient_of_zero(objective, micro_of):
    nothing = [[0.0, 0.0]]
    micro = micro_of(
        [[0, 0]],
        old_logprobs=nothing,
        ref_logprobs=nothing,
        advantages=nothing,
        returns=nothing,
        values=nothing,
        totals=Totals(tokens=7, sequences=2, rollouts=2, groups=1, max_length=4),
    )
    leaf = torch.tensor([math.nan, 1.0], requires_grad=True)
    out = objective(TokenOutputs(logprobs_T=leaf, entropy_T=leaf * 1, values_T=leaf), micro)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert leaf.grad.tolist() == [0.0, 0.0]
    metrics = combine([plain_metrics(out)])
    assert "ratio/max" not in metrics
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_outputs_that_are_not_finite_are_named(objective, poison, micro_of):
    zeros = [[0.0, 0.0], [0.0, 0.0]]
    micro = micro_of(
        [[0, 1], [0, 1]],
        ids=["row/1", "row/2"],
        old_logprobs=zeros,
        ref_logprobs=zeros,
        advantages=[[1.0, 1.0], [1.0, 1.0]],
        returns=zeros,
        values=zeros,
    )
    bad = torch.tensor([poison, 0.0, 0.0, poison])
    with raises_error(NonFiniteError, "token 1", "row/2"):
        finite_loss(objective, TokenOutputs(logprobs_T=bad, entropy_T=torch.zeros(4), values_T=bad), micro)


def test_an_input_that_is_not_finite_is_named(micro_of):
    micro = micro_of([[1]], advantages=[[math.nan]])
    with raises_error(NonFiniteError, "advantages", "token 0", "s0"):
        finite_loss(policy_objective(entropy_metric=False), TokenOutputs(logprobs_T=torch.tensor([0.0])), micro)


def test_missing_reference_logprobs_are_named(micro_of):
    outputs = TokenOutputs(logprobs_T=torch.tensor([0.0]), entropy_T=torch.tensor([0.0]))
    with raises_error(DataError, "ref_logprobs"):
        policy_objective(kl_coef=0.1)(outputs, micro_of([[1]], advantages=[[1.0]]))


# -- loss-layout invariance --------------------------------------------------------------------------------------------


class TinyModel(torch.nn.Module):
    """Logprob, entropy and value of each token from the token before it."""

    def __init__(self, vocab=11, width=8):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab + 1, width)
        self.head = torch.nn.Linear(width, vocab)
        self.value = torch.nn.Linear(width, 1)

    def forward(self, tokens):
        before = torch.cat([torch.tensor([11]), tokens[:-1]])
        hidden = torch.tanh(self.embed(before))
        logp = self.head(hidden).log_softmax(-1)
        return (
            logp.gather(-1, tokens[:, None])[:, 0],
            -(logp.exp() * logp).sum(-1),
            self.value(hidden)[:, 0],
        )


def random_batch(seed, lengths):
    generator = torch.Generator().manual_seed(seed)

    def noise(n):
        return torch.randn(n, generator=generator)

    sequences = []
    for length in lengths:
        mask = torch.rand(length, generator=generator) < 0.7
        mask[0] = False
        sequences.append(
            {
                "tokens": torch.randint(0, 11, (length,), generator=generator),
                "mask": mask,
                "old_logprobs": -2.4 + 0.3 * noise(length),
                "ref_logprobs": -2.4 + 0.3 * noise(length),
                "advantages": noise(length),
                "returns": noise(length),
                "values": noise(length),
            }
        )
    return sequences


def objective_and_gradient(model, objective, sequences, splits, micro_of):
    """Summed over microbatches, as a strategy does."""
    masks = [sequence["mask"] for sequence in sequences]
    totals = Totals(
        tokens=int(sum(mask.sum() for mask in masks)),
        sequences=sum(bool(mask.any()) for mask in masks),
        rollouts=sum(bool(mask.any()) for mask in masks),
        groups=1,
        max_length=16,
    )
    model.zero_grad()
    total, metrics = 0.0, {}
    for part in splits:
        chosen = [sequences[i] for i in part]
        fields = {
            name: [sequence[name].tolist() for sequence in chosen]
            for name in ("old_logprobs", "ref_logprobs", "advantages", "returns", "values")
        }
        micro = micro_of([sequence["mask"].int().tolist() for sequence in chosen], totals=totals, **fields)
        per_sequence = [model(sequence["tokens"]) for sequence in chosen]
        logprobs, entropy, values = (torch.cat(each) for each in zip(*per_sequence, strict=True))
        out = objective(TokenOutputs(logprobs_T=logprobs, entropy_T=entropy, values_T=values), micro)
        out.loss.backward()
        total += out.loss.item()
        for name, value in out.metrics.items():
            combine = max if name.endswith("/max") else min if name.endswith("/min") else float.__add__
            metrics[name] = combine(metrics[name], float(value)) if name in metrics else float(value)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return total, gradient, metrics


@st.composite
def layouts(draw):
    """Lengths of the sequences, and a partition of a permutation of them."""
    lengths = draw(st.lists(st.integers(2, 16), min_size=2, max_size=9))
    order = draw(st.permutations(range(len(lengths))))
    cuts = sorted(draw(st.sets(st.integers(1, len(lengths) - 1))))
    return lengths, [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]


@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(max_examples=12)
@given(layouts(), st.integers(0, 2**31))
def test_the_objective_is_the_same_however_the_batch_is_split(objective, micro_of, layout, seed):
    lengths, splits = layout
    sequences = random_batch(seed, lengths)
    torch.manual_seed(seed)
    model = TinyModel()
    whole = objective_and_gradient(model, objective, sequences, [range(len(lengths))], micro_of)
    split = objective_and_gradient(model, objective, sequences, splits, micro_of)
    assert split[0] == pytest.approx(whole[0], rel=1e-6, abs=1e-6)
    assert (split[1] - whole[1]).norm() <= 1e-6 * whole[1].norm() + 1e-9
    assert split[2] == pytest.approx(whole[2], rel=1e-5, abs=1e-6)
