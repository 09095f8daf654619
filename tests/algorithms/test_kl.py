"""KL estimators and the controller of the KL's weight."""

from __future__ import annotations

import math

import pytest
import torch

from roll_core.algorithms.kl import KLController, approx_kl
from roll_core.algorithms.losses import KLTerm
from roll_core.errors import NonFiniteError
from roll_core.spec.train import TokenOutputs

LN2 = math.log(2)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # d = logprob - ref_logprob = ln 2 and -ln 2
        ("k1", [LN2, -LN2]),
        ("k2", [LN2**2 / 2, LN2**2 / 2]),
        ("abs", [LN2, LN2]),
        ("k3", [0.5 - 1 + LN2, 2 - 1 - LN2]),  # exp(-d) - 1 + d
    ],
)
def test_estimators_by_hand(kind, expected):
    out = approx_kl(torch.tensor([LN2, 0.0]), torch.tensor([0.0, LN2]), kind)
    assert out.tolist() == pytest.approx(expected, rel=1e-6)


def test_unbiased_estimators_average_to_the_divergence():
    # p = (0.7, 0.2, 0.1), q = (0.4, 0.4, 0.2), expectation under p taken exactly
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.4, 0.4, 0.2])
    exact = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    for kind in ("k1", "k3"):
        assert (p * approx_kl(p.log(), q.log(), kind)).sum().item() == pytest.approx(exact, rel=1e-5)


def test_the_gradient_of_k2_is_that_of_the_divergence():
    # over logits of p, samples drawn from p without a path: E_p[d * grad log p] = grad KL(p || q)
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    q = torch.tensor([0.2, 0.5, 0.3])
    logp = logits.log_softmax(-1)
    (estimate,) = torch.autograd.grad((logp.exp().detach() * approx_kl(logp, q.log(), "k2")).sum(), logits)
    logp = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - q.log())).sum(), logits)
    assert torch.allclose(estimate, exact, atol=1e-6)


def test_k1_gradient_is_zero_in_expectation():
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    logp = logits.log_softmax(-1)
    k1 = approx_kl(logp, torch.tensor([0.2, 0.5, 0.3]).log(), "k1")
    (gradient,) = torch.autograd.grad((logp.exp().detach() * k1).sum(), logits)
    assert torch.allclose(gradient, torch.zeros(3), atol=1e-6)


def test_k3_is_never_negative_and_zero_for_equal_policies():
    gaps = torch.linspace(-30, 30, 1001)
    assert (approx_kl(gaps, torch.zeros_like(gaps), "k3") >= 0).all()
    assert approx_kl(torch.tensor([-1.5]), torch.tensor([-1.5]), "k3").item() == 0.0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_huge_log_ratios_stay_finite_in_value_and_gradient(kind, gap):
    logprobs = torch.tensor([gap], requires_grad=True)
    out = approx_kl(logprobs, torch.tensor([0.0]), kind)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(logprobs.grad).all()


def test_the_clamps_are_the_callers_to_choose():
    far = (torch.tensor([-5.0]), torch.tensor([0.0]))  # exp(5) - 1 - 5 = 142.41
    assert approx_kl(*far, "k3").item() == 10.0
    assert approx_kl(*far, "k3", k3_clamp=1e6).item() == pytest.approx(math.exp(5) - 6, rel=1e-6)
    assert approx_kl(*far, "k3", log_ratio_clamp=1.0).item() == pytest.approx(math.exp(1) - 2, rel=1e-6)


def test_the_weight_rises_above_the_target_and_falls_below_it():
    # kl 0.11 against 0.1: error 0.1, times 500 of 10 000 samples: 0.2 * (1 + 0.1 * 0.05) = 0.201
    controller = KLController(0.2, target=0.1, horizon=10_000)
    controller.update(0.11, num_samples=500)
    assert controller.coef == pytest.approx(0.201)
    # kl 0.05: error -0.5, clipped to -0.2: 0.201 * (1 - 0.2 * 0.05) = 0.19899
    controller.update(0.05, num_samples=500)
    assert controller.coef == pytest.approx(0.19899)


def test_the_weight_is_fixed_without_a_target():
    controller = KLController(0.2)
    controller.update(100.0, num_samples=10_000)
    assert controller.coef == 0.2


def test_the_weight_continues_after_a_resume():
    controller = KLController(0.2, target=0.1, horizon=100)
    controller.update(1.0, num_samples=10)
    resumed = KLController(0.2, target=0.1, horizon=100)
    resumed.load_state(controller.state())
    assert resumed.coef == controller.coef != 0.2


@pytest.mark.parametrize("target", [None, 0.1])
def test_a_kl_that_is_not_a_number_is_an_error(target):
    with pytest.raises(NonFiniteError):
        KLController(0.2, target=target).update(math.nan, num_samples=1)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_an_unbiased_kl_loss_has_the_gradient_of_the_kl(micro_of, kind):
    """Each of 5 tokens once, as a uniform old policy samples them: the mean is the expectation."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], requires_grad=True)
    reference = torch.tensor([0.5, 0.2, -0.3, 1.0, 0.0]).log_softmax(0)
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    micro = micro_of([[1]] * 5, old_logprobs=[[-math.log(5)]] * 5, ref_logprobs=[[each] for each in reference.tolist()])
    found = {}
    for unbiased in (True, False):
        term = KLTerm(kind=kind, unbiased=unbiased, aggregation="token-mean")
        loss = term(TokenOutputs(logprobs_T=logprobs), micro).loss
        (found[unbiased],) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert loss.item() == pytest.approx(exact.item(), rel=1e-5) or not unbiased
    assert torch.allclose(found[True], expected, atol=1e-6)
    assert not torch.allclose(found[False], expected, atol=1e-2)


def test_unbiased_kl_loss_keeps_the_gradient_of_the_ratio(micro_of):
    # d = ln 2: k3 = 1/2 - 1 + ln 2; its gradient is 1 - exp(-d) = 1/2, that of the ratio 1.
    micro = micro_of([[1]], ref_logprobs=[[-2.0]])
    logprobs = torch.tensor([-2.0 + math.log(2)], requires_grad=True)
    output = KLTerm(unbiased=True)(TokenOutputs(logprobs_T=logprobs), micro)
    output.loss.backward()
    k3 = math.log(2) - 0.5
    assert output.metrics["kl_loss"].item() == pytest.approx(k3)
    assert logprobs.grad.item() == pytest.approx(0.5 + k3)
