"""Advantage estimators against numbers worked out by hand and against loops over tokens."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.algorithms.advantages import gae, grpo, reinforce, rloo
from roll_core.errors import NonFiniteError, UnsupportedError
from roll_core.spec.algorithms import AdvantageInput
from roll_testing.errors import raises_error


def batch_of(rewards, masks, *, groups=None, values=None, gamma=1.0, lambd=1.0, scores=None):
    """Per-sequence lists laid end to end. Rewards of single tokens enter as a negative KL, `scores` by sequence."""
    segments = [s for s, mask in enumerate(masks) for _ in mask]
    return AdvantageInput(
        scores_S=torch.tensor(scores or [0.0] * len(masks), dtype=torch.float32),
        kl_T=torch.tensor([-r for row in rewards for r in row], dtype=torch.float32),
        kl_coef=1.0,
        mask_T=torch.tensor([bool(m) for mask in masks for m in mask], dtype=torch.bool),
        segments_T=torch.tensor(segments, dtype=torch.int64),
        groups_S=torch.tensor(groups or list(range(len(masks))), dtype=torch.int64),
        values_T=None if values is None else torch.tensor([v for row in values for v in row], dtype=torch.float32),
        gamma=gamma,
        lambd=lambd,
    )


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_reinforce_discounts_the_reward_to_each_token():
    # prompt, then three drawn tokens with rewards 0.5, 0, 2 and gamma 0.5:
    # G_3 = 2;  G_2 = 0 + 0.5*2 = 1;  G_1 = 0.5 + 0.5*1 = 1
    out = reinforce(batch_of([[0, 0.5, 0, 2]], [[0, 1, 1, 1]], gamma=0.5))
    assert out.advantages_T.tolist() == [0, 1, 1, 2]
    assert out.returns_T.tolist() == [0, 1, 1, 2]


def test_reinforce_does_not_leak_from_one_sequence_into_the_next():
    out = reinforce(batch_of([[0, 1], [0, 10]], [[1, 1], [1, 1]], gamma=1.0))
    assert out.advantages_T.tolist() == [1, 1, 10, 10]


def test_a_gap_of_environment_tokens_is_no_step_in_time():
    # drawn, drawn, two tokens of the environment, drawn with reward 8; gamma 0.5:
    # G at the drawn tokens from the end: 8, 4, 2 - the gap discounts nothing and gets no credit
    out = reinforce(batch_of([[0, 0, 0, 0, 8]], [[1, 1, 0, 0, 1]], gamma=0.5))
    assert out.advantages_T.tolist() == [2, 4, 0, 0, 8]


def test_rewards_off_the_mask_are_not_read():
    out = reinforce(batch_of([[math.nan, 0, 99, 1]], [[0, 1, 0, 1]]))
    assert out.advantages_T.tolist() == [0, 1, 0, 1]


def test_grpo_gives_every_token_the_reward_relative_to_its_group():
    # Group 7: rewards 1, 4: mean 2.5, unbiased deviation sqrt(2 * 1.5^2 / 1) = 1.5 * sqrt(2), so -+ 1/sqrt(2).
    # Group 2 has no spread.
    masks = [[0, 1, 1], [1, 1, 0], [1], [1]]
    zeros = [[0] * len(mask) for mask in masks]
    out = grpo(batch_of(zeros, masks, groups=[7, 7, 2, 2], scores=[1, 4, 3, 3]))
    assert out.advantages_T.tolist() == pytest.approx([0, *[-(0.5**0.5)] * 2, *[0.5**0.5] * 2, 0, 0, 0], abs=1e-6)
    assert out.returns_T is None


def test_grpo_counts_penalties_from_the_token_on():
    # The score alone in its group counts 0; penalties 0.1, 0.2, 0.3: -0.3; -0.3-0.2 = -0.5; -0.5-0.1 = -0.6
    out = grpo(batch_of([[-0.1, -0.2, -0.3]], [[1, 1, 1]], scores=[5]))
    assert out.advantages_T.tolist() == pytest.approx([-0.6, -0.5, -0.3])


def test_rloo_subtracts_the_mean_of_the_others():
    # rewards 1, 0, 0.5 of one prompt: 1-(0+0.5)/2 = 0.75; 0-(1+0.5)/2 = -0.75; 0.5-(1+0)/2 = 0
    out = rloo(batch_of([[0, 1], [0, 0], [0.5]], [[1, 1], [0, 1], [1]], groups=[3, 3, 3]))
    assert out.advantages_T.tolist() == pytest.approx([0.75, 0.75, 0, -0.75, 0])


def test_rloo_keeps_groups_apart_however_they_are_interleaved():
    # group 0: 1 and 3, group 5: 10 and 20
    out = rloo(batch_of([[1], [10], [3], [20]], [[1]] * 4, groups=[0, 5, 0, 5]))
    assert out.advantages_T.tolist() == [-2, -10, 2, 10]


def test_rloo_counts_penalties_in_the_reward_of_the_sequence():
    # totals 1 - 0.5 = 0.5 and 0: 0.5 and -0.5, the same for both tokens of the first
    out = rloo(batch_of([[-0.5, 1], [0]], [[1, 1], [1]], groups=[0, 0]))
    assert out.advantages_T.tolist() == [0.5, 0.5, -0.5]


def test_rloo_gives_a_group_of_one_no_credit():
    out = rloo(batch_of([[5], [1], [0]], [[1]] * 3, groups=[0, 1, 1]))
    assert out.advantages_T.tolist() == [0, 1, -1]


def test_rloo_does_not_compare_with_an_empty_response():
    out = rloo(batch_of([[5], [0], [1]], [[1], [0], [1]], groups=[0, 0, 0]))
    assert out.advantages_T.tolist() == [4, 0, -4]


def test_rloo_refuses_a_discount():
    with raises_error(UnsupportedError, "0.9"):
        rloo(batch_of([[1]], [[1]], gamma=0.9))


def test_gae_by_hand():
    # gamma 0.5, lambda 0.5, rewards 0, 0, 1, values 0.2, 0.4, 0.6
    # delta_3 = 1 - 0.6 = 0.4;               A_3 = 0.4
    # delta_2 = 0 + 0.5*0.6 - 0.4 = -0.1;    A_2 = -0.1 + 0.25*0.4 = 0
    # delta_1 = 0 + 0.5*0.4 - 0.2 = 0;       A_1 = 0 + 0.25*0 = 0
    # returns: A + V = 0.2, 0.4, 1.0
    out = gae(batch_of([[9, 0, 0, 1]], [[0, 1, 1, 1]], values=[[9, 0.2, 0.4, 0.6]], gamma=0.5, lambd=0.5))
    assert out.advantages_T.tolist() == pytest.approx([0, 0, 0, 0.4], abs=1e-7)
    assert out.returns_T.tolist() == pytest.approx([0, 0.2, 0.4, 1.0])


def test_gae_uses_the_next_sampled_tokens_value_across_a_gap():
    # gamma 1, lambda 0: A_t = r_t + V_next - V_t, where the next of token 0 is token 3
    out = gae(batch_of([[0, 0, 0, 1]], [[1, 0, 0, 1]], values=[[0.5, 7, 7, 0.25]], gamma=1.0, lambd=0.0))
    assert out.advantages_T.tolist() == [-0.25, 0, 0, 0.75]
    assert out.returns_T.tolist() == [0.25, 0, 0, 1]


def test_gae_with_lambda_one_is_the_return_less_the_value():
    batch = batch_of([[0, 0, 3], [1, 1]], [[1, 1, 1], [1, 1]], values=[[1, 2, 3], [4, 5]], gamma=0.9, lambd=1.0)
    expected = reinforce(batch).advantages_T - batch.values_T
    assert torch.allclose(gae(batch).advantages_T, expected, atol=1e-6)


def test_gae_needs_a_critic():
    with raises_error(UnsupportedError, "critic"):
        gae(batch_of([[1]], [[1]]))


# -- hard cases --------------------------------------------------------------------------------------------------------

ESTIMATORS = [reinforce, grpo, rloo, gae]


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_batch_without_sampled_tokens_gets_zeros(estimate):
    out = estimate(batch_of([[1, 2], [3]], [[0, 0], [0]], values=[[1, 1], [1]]))
    assert out.advantages_T.tolist() == [0, 0, 0]


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_an_empty_batch_is_no_error(estimate):
    assert estimate(batch_of([], [], values=[])).advantages_T.shape == (0,)


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_estimates_of_a_single_token(estimate):
    out = estimate(batch_of([[2.0]], [[1]], values=[[0.5]]))
    assert out.advantages_T.tolist() == [{reinforce: 2, grpo: 2, rloo: 0, gae: 1.5}[estimate]]


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_an_error(estimate, poison):
    with pytest.raises(NonFiniteError):
        estimate(batch_of([[0, poison]], [[1, 1]], values=[[0, 0]]))
    with pytest.raises(NonFiniteError):
        estimate(batch_of([[0, 0]], [[1, 1]], values=[[0, 0]], scores=[poison]))


def test_values_that_are_not_finite_are_an_error():
    with raises_error(NonFiniteError, "critic"):
        gae(batch_of([[0, 1]], [[1, 1]], values=[[0, math.nan]]))


# -- against loops over tokens -----------------------------------------------------------------------------------------


def loop_reinforce(rewards, masks, gamma):
    out = []
    for row, mask in zip(rewards, masks, strict=True):
        credit, ahead = [0.0] * len(row), 0.0
        for t in reversed(range(len(row))):
            if mask[t]:
                ahead = row[t] + gamma * ahead
                credit[t] = ahead
        out += credit
    return out


def loop_gae(rewards, masks, values, gamma, lambd):
    out = []
    for row, mask, value in zip(rewards, masks, values, strict=True):
        credit, ahead, next_value = [0.0] * len(row), 0.0, 0.0
        for t in reversed(range(len(row))):
            if mask[t]:
                delta = row[t] + gamma * next_value - value[t]
                ahead = delta + gamma * lambd * ahead
                next_value = value[t]
                credit[t] = ahead
        out += credit
    return out


def loop_rloo(rewards, masks, groups):
    totals = [sum(r for r, m in zip(row, mask, strict=True) if m) for row, mask in zip(rewards, masks, strict=True)]
    out = []
    for i, mask in enumerate(masks):
        others = [totals[j] for j in range(len(masks)) if j != i and groups[j] == groups[i] and any(masks[j])]
        credit = totals[i] - sum(others) / len(others) if others else 0.0
        out += [credit if m else 0.0 for m in mask]
    return out


@st.composite
def ragged(draw):
    """Rewards, values and masks (with gaps) of up to 8 sequences of up to 40 tokens, in up to 3 groups."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    density = draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    rewards = [[rng.uniform(-2, 2) for _ in range(n)] for n in lengths]
    values = [[rng.uniform(-2, 2) for _ in range(n)] for n in lengths]
    masks = [[int(rng.random() < density) for _ in range(n)] for n in lengths]
    groups = [rng.choice([0, 4, 11]) for _ in lengths]
    return rewards, values, masks, groups


DISCOUNTS = st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0])


@settings(max_examples=60)
@given(ragged(), DISCOUNTS, DISCOUNTS)
def test_estimators_equal_loops_over_tokens(case, gamma, lambd):
    rewards, values, masks, groups = case
    batch = batch_of(rewards, masks, groups=groups, values=values, gamma=gamma, lambd=lambd)
    expected_return = torch.tensor(loop_reinforce(rewards, masks, gamma))
    assert torch.allclose(reinforce(batch).advantages_T, expected_return, atol=1e-5)
    assert torch.allclose(grpo(batch).advantages_T, expected_return, atol=1e-5)
    expected_gae = torch.tensor(loop_gae(rewards, masks, values, gamma, lambd))
    assert torch.allclose(gae(batch).advantages_T, expected_gae, atol=1e-5)
    if gamma == 1.0:
        assert torch.allclose(rloo(batch).advantages_T, torch.tensor(loop_rloo(rewards, masks, groups)), atol=1e-5)


def test_a_long_sequence_keeps_its_precision():
    # 100 000 tokens of reward 0.1 and gamma 1: the first token's return is 10 000 to float32's precision
    out = reinforce(batch_of([[0.1] * 100_000], [[1] * 100_000]))
    assert out.advantages_T[0].item() == pytest.approx(10_000, rel=1e-6)
