import itertools
from math import cos, exp, log, pi, sin, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from roll_core.errors import UnsupportedError
from roll_pipeline_diffusion.samplers import SamplerStep, Transition, cps, dance, ode, sde
from roll_pipeline_diffusion.schedules import DynamicShift, SigmaSchedule

MEAN, STD = 0.5, 0.3
"""Mean and standard deviation of the data."""


def step(sigma, sigma_next, second=0.9):
    values = [torch.tensor([[each]], dtype=torch.float64) for each in (sigma, sigma_next, second)]
    return SamplerStep(sigma=values[0], sigma_next=values[1], sigma_second=values[2])


def numbers(*values):
    return torch.tensor([values], dtype=torch.float64)


def test_a_step_of_each_sampler_by_hand():
    """x = 2, v = 1, from sigma 0.5 to 0.4: x_0 = 1.5 and the predicted noise is 2.5."""
    x, v, at = numbers(2.0), numbers(1.0), step(0.5, 0.4)

    assert ode(x, v, at).mean.item() == pytest.approx(1.9)
    assert ode(x, v, at).std.item() == 0
    flow = sde(x, v, at, noise_level=0.7)  # s² = 0.49 · 0.5 / 0.5
    assert flow.mean.item() == pytest.approx(2 * (1 - 0.049) - 0.1 * (1 + 0.49 * 0.5))
    assert flow.mean.item() == pytest.approx(1.7775)
    assert flow.std.item() == pytest.approx(0.7 * sqrt(0.1))
    constant = dance(x, v, at, noise_level=0.3)
    assert constant.mean.item() == pytest.approx(1.8775)
    assert constant.std.item() == pytest.approx(0.3 * sqrt(0.1))
    kept = cps(x, v, at, noise_level=0.7)
    assert kept.std.item() == pytest.approx(0.4 * sin(0.35 * pi))
    assert kept.mean.item() == pytest.approx(0.6 * 1.5 + 0.4 * cos(0.35 * pi) * 2.5)


def test_the_first_step_of_sde_has_the_noise_of_the_second_sigma():
    first = sde(numbers(1.0), numbers(0.0), step(1.0, 0.9, second=0.9), noise_level=0.7)

    assert first.std.item() == pytest.approx(sqrt(0.49 / 0.1 * 0.1))
    assert first.mean.item() == pytest.approx(1 - 4.9 / 2 * 0.1)


@pytest.mark.parametrize("sampler", [sde, dance, cps])
def test_without_noise_every_sampler_is_the_ode(sampler):
    x, v, at = numbers(2.0, -1.0), numbers(1.0, 0.3), step(0.5, 0.4)

    found = sampler(x, v, at, noise_level=1e-6)

    torch.testing.assert_close(found.mean, ode(x, v, at).mean, rtol=0, atol=1e-9)


@given(
    sigma=st.floats(0.05, 0.95), part=st.floats(0.1, 0.9), x=st.floats(-3, 3), v=st.floats(-3, 3), eta=st.floats(0.1, 1)
)
def test_dance_is_the_ode_with_a_step_along_the_score(sigma, part, x, v, eta):
    """DanceGRPO's form: x + (v - s²/2 · score) dt, with score = -(x - (1 - σ) x_0) / σ²."""
    after = sigma * part
    score = -(x - (1 - sigma) * (x - sigma * v)) / sigma**2

    found = dance(numbers(x), numbers(v), step(sigma, after), noise_level=eta)

    assert found.mean.item() == pytest.approx(x + (v - eta**2 / 2 * score) * (after - sigma), abs=1e-9)


def last_std(sampler, num_steps, **options):
    """Exact std of the final samples of data N(0.5, 0.3²): steps are affine in x, because the exact velocity is."""
    sigmas = SigmaSchedule(num_steps=num_steps).sigmas(())
    variance = 1.0
    for sigma, after in itertools.pairwise(sigmas):
        total = (1 - sigma) ** 2 * STD**2 + sigma**2
        x = numbers(0.0, 1.0)
        shift = x - (1 - sigma) * MEAN
        velocity = sigma / total * shift - (MEAN + (1 - sigma) * STD**2 / total * shift)
        found = sampler(x, velocity, step(sigma, after, second=sigmas[1]), **options)
        slope = float(found.mean[0, 1] - found.mean[0, 0])
        variance = slope**2 * variance + float(found.std.flatten()[0]) ** 2
    return sqrt(variance)


@pytest.mark.parametrize(
    ("sampler", "options", "with_10", "with_200"),
    [
        (ode, {}, 0.2469, 0.2971),
        (sde, {"noise_level": 0.7}, 0.2820, 0.2999),
        (dance, {"noise_level": 0.3}, 0.2615, 0.2979),
        (dance, {"noise_level": 0.7}, 0.3021, 0.2999),
        (cps, {"noise_level": 0.7}, 0.2132, 0.2512),
    ],
)
def test_std_of_the_samples_after_few_and_many_steps(sampler, options, with_10, with_200):
    """The figures of the module's table, which 200 000 samples of each confirm within 0.002."""
    assert last_std(sampler, 10, **options) == pytest.approx(with_10, abs=1e-4)
    assert last_std(sampler, 200, **options) == pytest.approx(with_200, abs=1e-4)


@pytest.mark.parametrize("sampler", [ode, sde, dance])
def test_ode_sde_and_dance_keep_the_marginals_as_steps_grow(sampler):
    errors = [abs(last_std(sampler, steps) - STD) for steps in (10, 100, 1000)]

    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-3


def test_cps_does_not_keep_the_marginals():
    assert abs(last_std(cps, 1000) - STD) > 0.04


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_logprob_and_kl_are_those_of_the_normal_distribution(reduction):
    generator = torch.Generator().manual_seed(1)
    mean, other, y = (torch.randn(3, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    std = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)[:, None, None]
    reduce = torch.mean if reduction == "mean" else torch.sum

    found = Transition(mean=mean, std=std)

    expected = torch.stack([reduce(Normal(mean[at], std[at]).log_prob(y[at])) for at in range(3)])
    torch.testing.assert_close(found.logprob(y, reduction), expected)
    exact = kl_divergence(Normal(mean, std), Normal(other, std))
    torch.testing.assert_close(found.kl_per_dim(other), exact)


def test_logprob_by_hand():
    found = Transition(mean=numbers(1.0, 2.0), std=torch.full((1, 1), 0.5, dtype=torch.float64))

    expected = -(0.25 / 0.5) / 2 - log(0.5) - 0.5 * log(2 * pi)
    assert found.logprob(numbers(1.5, 2.0), "mean").item() == pytest.approx(expected)
    assert found.logprob(numbers(1.5, 2.0), "sum").item() == pytest.approx(2 * expected)


def test_a_schedule_ends_at_zero_and_shifts_toward_noise():
    assert SigmaSchedule(num_steps=4).sigmas((4, 8, 8)) == (1.0, 0.75, 0.5, 0.25, 0.0)
    assert SigmaSchedule(num_steps=4, shift=3.0).sigmas(()) == pytest.approx((1.0, 0.9, 0.75, 0.5, 0.0))


def test_dynamic_shift_is_exponential_in_the_number_of_tokens():
    schedule = SigmaSchedule(num_steps=2, dynamic_shift=DynamicShift())

    for shape, mu in (((16, 32, 32), 0.5), ((16, 128, 128), 1.15), ((16, 2, 64, 32), 0.5 + 0.65 * 768 / 3840)):
        shift = exp(mu)
        assert schedule.sigmas(shape)[1] == pytest.approx(shift * 0.5 / (1 + (shift - 1) * 0.5))


@given(num_steps=st.integers(1, 60), shift=st.floats(0.1, 20))
def test_sigmas_decrease_strictly_from_one_to_zero(num_steps, shift):
    sigmas = SigmaSchedule(num_steps=num_steps, shift=shift).sigmas(())

    assert len(sigmas) == num_steps + 1
    assert (sigmas[0], sigmas[-1]) == (1.0, 0.0)
    assert all(before > after for before, after in itertools.pairwise(sigmas))


@pytest.mark.parametrize("values", [{"num_steps": 0}, {"num_steps": 3, "shift": 0.0}])
def test_a_schedule_without_steps_or_shift_is_refused(values):
    with pytest.raises(UnsupportedError):
        SigmaSchedule(**values)
