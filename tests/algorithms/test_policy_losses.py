"""Policy losses per token, by hand and against a loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.algorithms.policy_losses import ppo, vanilla
from roll_core.errors import DataError
from roll_core.spec.algorithms import PolicyLossParams
from roll_testing.errors import raises_error

LN2 = math.log(2)


def one_each(micro_of, log_ratios, advantages):
    """A sequence of one masked token per pair, old logprobs of -1."""
    n = len(log_ratios)
    micro = micro_of([[1]] * n, old_logprobs=[[-1.0]] * n, advantages=[[a] for a in advantages])
    return torch.tensor([ratio - 1.0 for ratio in log_ratios]), micro


def test_ppo_by_hand(micro_of):
    # ratio 2 and 0.5 with clip 0.2:
    #   A = 1:  r 2:   min(2, 1.2) = 1.2  -> -1.2 (clipped);   r 0.5: min(0.5, 0.8) = 0.5 -> -0.5
    #   A = -1: r 2:   min(-2, -1.2) = -2 -> 2;                r 0.5: min(-0.5, -0.8) = -0.8 -> 0.8 (clipped)
    logprobs, micro = one_each(micro_of, [LN2, -LN2, LN2, -LN2], [1, 1, -1, -1])
    loss, metrics = ppo(logprobs, micro, PolicyLossParams())
    assert loss.tolist() == pytest.approx([-1.2, -0.5, 2.0, 0.8])
    assert metrics["clipfrac_high"].tolist() == [1, 0, 0, 0]
    assert metrics["clipfrac_low"].tolist() == [0, 0, 0, 1]
    assert metrics["clipfrac"].tolist() == [1, 0, 0, 1]
    assert metrics["ratio"].tolist() == pytest.approx([2, 0.5, 2, 0.5])
    # KL(old || new) by k3, r - 1 - ln r: 2 - 1 - ln 2 and 0.5 - 1 + ln 2
    assert metrics["approx_kl"].tolist() == pytest.approx([1 - LN2, LN2 - 0.5] * 2, rel=1e-5)


def test_clip_higher_has_two_ranges(micro_of):
    # low 0.1, high 0.5: A = 1, r 2: -1.5;  A = -1, r 0.5: 0.9
    logprobs, micro = one_each(micro_of, [LN2, -LN2], [1, -1])
    loss, _ = ppo(logprobs, micro, PolicyLossParams(pg_clip_low=0.1, pg_clip_high=0.5))
    assert loss.tolist() == pytest.approx([-1.5, 0.9])


def test_dual_clip_bounds_only_negative_advantages(micro_of):
    # c = 3, r = 8: A = -2: min(16, 3*2) = 6;  A = 2: -1.2*2 = -2.4;  r = 2, A = -2: 4, below the bound of 6
    logprobs, micro = one_each(micro_of, [3 * LN2, 3 * LN2, LN2], [-2, 2, -2])
    loss, metrics = ppo(logprobs, micro, PolicyLossParams(dual_clip=3.0))
    assert loss.tolist() == pytest.approx([6.0, -2.4, 4.0])
    assert metrics["dual_clipfrac"].tolist() == [1, 0, 0]


def test_a_clipped_token_has_no_gradient(micro_of):
    logprobs, micro = one_each(micro_of, [LN2, -LN2, LN2, -LN2, 3 * LN2], [1, 1, -1, -1, -1])
    logprobs.requires_grad_()
    ppo(logprobs, micro, PolicyLossParams(dual_clip=3.0))[0].sum().backward()
    # unclipped: d(-r A)/d logprob = -r A
    assert logprobs.grad.tolist() == pytest.approx([0, -0.5, 2, 0, 0])


def test_on_policy_the_gradient_is_the_policy_gradient(micro_of):
    micro = micro_of([[1, 1]], advantages=[[2.0, -3.0]], old_logprobs=[[-1.0, -2.0]])
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    ppo(logprobs, micro, PolicyLossParams())[0].sum().backward()
    assert logprobs.grad.tolist() == [-2.0, 3.0]


def test_without_old_logprobs_the_ratio_is_one(micro_of):
    micro = micro_of([[1, 1]], advantages=[[2.0, -3.0]])
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, metrics = ppo(logprobs, micro, PolicyLossParams())
    loss.sum().backward()
    assert loss.tolist() == [-2.0, 3.0]
    assert logprobs.grad.tolist() == [-2.0, 3.0]
    assert metrics["ratio"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_huge_log_ratios_stay_finite(micro_of, log_ratio, advantage, dual_clip):
    logprobs, micro = one_each(micro_of, [log_ratio], [advantage])
    logprobs.requires_grad_()
    loss, metrics = ppo(logprobs, micro, PolicyLossParams(dual_clip=dual_clip))
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(each).all() for each in metrics.values())


def test_the_clamp_of_the_log_ratio_is_an_option(micro_of):
    logprobs, micro = one_each(micro_of, [5.0], [-1])
    loss, _ = ppo(logprobs, micro, PolicyLossParams(options={"log_ratio_clamp": 1.0}))
    assert loss.item() == pytest.approx(math.e)


def test_vanilla_by_hand(micro_of):
    micro = micro_of([[0, 1, 1]], advantages=[[9.0, 2.0, -3.0]], old_logprobs=[[0.0, -1.0, -2.0]])
    logprobs = torch.tensor([math.nan, -1.0, -2.0 + LN2], requires_grad=True)
    loss, metrics = vanilla(logprobs, micro, PolicyLossParams())
    loss.sum().backward()
    # -A * logprob: -2 * -1 = 2;  3 * (-2 + ln 2)
    assert loss.tolist() == pytest.approx([0, 2.0, 3 * (-2 + LN2)])
    assert logprobs.grad.tolist() == [0, -2.0, 3.0]
    assert metrics["ratio"].tolist() == pytest.approx([1, 1, 2])


@pytest.mark.parametrize("loss", [ppo, vanilla])
def test_a_batch_without_advantages_is_refused(loss, micro_of):
    with raises_error(DataError, "advantages"):
        loss(torch.tensor([0.0]), micro_of([[1]]), PolicyLossParams())


def loop_ppo(logprob, old, advantage, low, high, dual_clip):
    ratio = math.exp(min(max(logprob - old, -20), 20))
    loss = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual_clip is not None and advantage < 0:
        loss = min(loss, -dual_clip * advantage)
    return loss


@settings(max_examples=100)
@given(
    st.lists(st.tuples(*[st.floats(-8, 0, width=32)] * 2, st.floats(-3, 3, width=32)), min_size=1, max_size=12),
    st.floats(0.05, 0.5),
    st.floats(0.05, 2.0),
    st.sampled_from([None, 1.5, 3.0]),
)
def test_ppo_equals_a_loop_over_tokens(micro_of, rows, low, high, dual_clip):
    n = len(rows)
    micro = micro_of([[1]] * n, old_logprobs=[[old] for _, old, _ in rows], advantages=[[a] for _, _, a in rows])
    params = PolicyLossParams(pg_clip_low=low, pg_clip_high=high, dual_clip=dual_clip)
    loss, metrics = ppo(torch.tensor([row[0] for row in rows]), micro, params)
    expected = [loop_ppo(*row, low, high, dual_clip) for row in rows]
    assert loss.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert set(metrics["clipfrac"].tolist()) <= {0.0, 1.0}
