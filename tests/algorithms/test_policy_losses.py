"""Policy losses per token, by hand and against a loop."""

from __future__ import annotations

import math

import pytest
import torch

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


def test_the_clamp_of_the_log_ratio_is_an_option(micro_of):
    logprobs, micro = one_each(micro_of, [5.0], [-1])
    loss, _ = ppo(logprobs, micro, PolicyLossParams(options={"log_ratio_clamp": 1.0}))
    assert loss.item() == pytest.approx(math.e)


@pytest.mark.parametrize("loss", [ppo, vanilla])
def test_a_batch_without_advantages_is_refused(loss, micro_of):
    with raises_error(DataError, "advantages"):
        loss(torch.tensor([0.0]), micro_of([[1]]), PolicyLossParams())
