import itertools
import pickle
from dataclasses import replace
from math import exp, log, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import logsigmoid

from roll_core.errors import ContractError, DataError, NonFiniteError
from roll_pipeline_diffusion.algorithm_config import BoundFunction
from roll_pipeline_diffusion.objectives import ObjectiveLoss
from roll_pipeline_diffusion.programs import SamplingProgram, VelocityProgram, noise, random_sigmas
from shared_tests.flow_double import (
    SHAPE,
    ConstantNet,
    ModuleDouble,
    TinyFlowNet,
    flow_batch,
    flow_setup,
    flow_tensors,
)

CPU = torch.device("cpu")
UNIFORM = {"distribution": "uniform", "mean": 0.0, "std": 1.0}


def red(latents, batch):
    """A differentiable reward that differs by row."""
    found = latents[:, 0].flatten(1) - 0.3 * latents[:, 1].flatten(1).square()
    return found.mean(1) + batch.tensors["cond.prompt"][:, 0]


def blind(latents, batch):
    return red(latents.detach(), batch)


def scalar(latents, batch):
    return red(latents, batch).mean()


def brighter(latents):
    return 2 * latents + 0.1


def module(seed=0):
    """Trained, base and averaged weights differ."""
    return ModuleDouble(TinyFlowNet(seed), base=TinyFlowNet(seed + 1), average=TinyFlowNet(seed + 2))


def loss_of(name, setup=None, **options):
    return ObjectiveLoss(
        function=BoundFunction(target=f"roll_pipeline_diffusion.objectives:{name}", options=options),
        setup=setup or flow_setup(reward=red),
    )


def gradients(loss, double, *batches):
    """Loss, metrics and gradients, summed over batches."""
    total, metrics = 0.0, {}
    double.net.zero_grad()
    for batch in batches:
        found = loss(double, batch)
        found.loss.backward()
        total += found.loss.item()
        for key, value in found.metrics.items():
            if not key.endswith(("/max", "/min")):
                metrics[key] = metrics.get(key, 0.0) + float(value)
    return total, metrics, [each.grad.clone() for each in double.net.parameters()]


def trajectory(setup, tensors, double, window=(0, 2), velocities=True):
    """The tensors and a trajectory that other weights sampled, with a teacher's velocities."""
    program = SamplingProgram(setup=setup, window=window, keep_velocities=velocities)
    steps = {name: each for name, each in program(double, flow_batch(tensors)).items() if name != "latents"}
    teacher = VelocityProgram(setup=setup)(ModuleDouble(TinyFlowNet(9)), flow_batch({**tensors, **steps}))
    return {**tensors, **steps, **teacher}


CASES = {
    "refl": ("refl", {"grad_steps": 2}, {}),
    "refl: everything": (
        "refl",
        {"grad_steps": 3, "lv_samples": 2, "kl_coef": 0.5, "pretrain_loss_coef": 0.3, "reward_offset": 0.2},
        {"guidance_scale": 2.0, "decode": brighter},
    ),
    "flow_grpo": ("flow_grpo", {"clip": 0.05, "kl_coef": 0.1}, {}),
    "flow_grpo: sum": ("flow_grpo", {"clip": 0.2}, {"logprob_reduction": "sum", "guidance_scale": 1.5}),
    "flow_grpo: guard": ("flow_grpo", {"variant": "guard", "clip": 0.05, "kl_coef": 0.1, "kl": "flow_grpo"}, {}),
    "flow_grpo: dppo": ("flow_grpo", {"variant": "dppo", "kl_coef": 0.1, "kl": "velocity"}, {}),
    "nft": ("nft", {"kl_coef": 0.1}, {}),
    "diffusion_dpo": ("diffusion_dpo", {"beta": 10.0}, {}),
    "flow_matching": ("flow_matching", {"conditioning_dropout": 0.5}, {}),
    "distill": ("distill", {}, {}),
    "distill: velocity": ("distill", {"loss": "velocity"}, {}),
}


@settings(max_examples=5)
@given(order=st.permutations(range(5)), cut=st.integers(1, 4))
@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_metrics_are_equal_for_any_split(case, order, cut):
    name, options, others = CASES[case]
    setup = flow_setup(reward=red, **others)
    tensors, double = trajectory(setup, flow_tensors(), ModuleDouble(TinyFlowNet(5))), module()
    loss = loss_of(name, setup, **options)

    whole = gradients(loss, double, flow_batch(tensors))
    parts = [flow_batch(tensors, rows, total_rows=5) for rows in (order[:cut], order[cut:])]
    split = gradients(loss, double, *parts)

    assert split[0] == pytest.approx(whole[0], rel=1e-4, abs=1e-6)
    assert split[1] == pytest.approx(whole[1], rel=1e-4, abs=1e-6)
    assert max(float(each.abs().max()) for each in whole[2]) > 0
    for found, expected in zip(split[2], whole[2], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_losses_are_picklable(case):
    name, options, others = CASES[case]
    loss = loss_of(name, flow_setup(reward=red, **others), **options)

    assert pickle.loads(pickle.dumps(loss)) == loss


def unrolled(net, tensors, *, num_steps, grad_steps, stop, predict, detach=False, low=0.0, high=1.0):
    """Independent answer: scores of one row at a time, and the steps' velocities by plain autograd."""
    scores = []
    for row in range(len(tensors["seed"])):
        batch = flow_batch(tensors, [row])
        x, prompt = noise(batch, "initial", SHAPE, CPU), tensors["cond.prompt"][[row]]
        for index in range(stop + 1):
            sigma, after = 1 - index / num_steps, 1 - (index + 1) / num_steps
            v = net(x.detach() if detach else x, torch.tensor([sigma]), prompt)
            if index <= stop - grad_steps or not low <= sigma <= high:
                v = v.detach()
            x = x - sigma * v if index == stop and predict == "x0" else x + (after - sigma) * v
        scores.append(red(x, batch))
    return torch.cat(scores)


@pytest.mark.parametrize("detach_inputs", [False, True])
@pytest.mark.parametrize("predict", ["x0", "sample"])
@pytest.mark.parametrize(("grad_steps", "stop"), [(1, None), (2, None), (4, None), (1, 1), (2, 2)])
def test_the_gradient_of_refl_is_that_of_the_unrolled_loop(grad_steps, stop, predict, detach_inputs):
    tensors, double = flow_tensors(), module()
    setup = flow_setup(reward=red, sampler="ode", stop_step=stop)
    options = {"grad_steps": grad_steps, "predict": predict, "detach_inputs": detach_inputs}

    value, metrics, found = gradients(loss_of("refl", setup, **options), double, flow_batch(tensors))

    final = 3 if stop is None else stop
    net = TinyFlowNet(0)
    scores = unrolled(
        net, tensors, num_steps=4, grad_steps=grad_steps, stop=final, predict=predict, detach=detach_inputs
    )
    (-scores.mean()).backward()
    assert value == pytest.approx(-scores.mean().item(), rel=1e-5)
    assert metrics["score"] == pytest.approx(scores.mean().item(), rel=1e-5)
    for one, parameter in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-6)
    assert [grad for _, grad in double.calls] == [at > final - grad_steps for at in range(final + 1)]


def test_gradient_of_every_step_is_full_backpropagation():
    tensors, double = flow_tensors(), module()
    _, _, found = gradients(
        loss_of("refl", flow_setup(reward=red, sampler="ode"), grad_steps=4), double, flow_batch(tensors)
    )

    net = TinyFlowNet(0)
    x = noise(flow_batch(tensors), "initial", SHAPE, CPU)
    for sigma in (1.0, 0.75, 0.5, 0.25):
        x = x - 0.25 * net(x, torch.full((5,), sigma), tensors["cond.prompt"])
    (-red(x, flow_batch(tensors)).mean()).backward()

    for one, parameter in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-6)


def test_refl_has_no_gradients_outside_its_range_of_sigmas():
    tensors, double = flow_tensors(), module()
    setup = flow_setup(reward=red, sampler="ode")
    options = {"grad_steps": 3, "min_timestep_boundary": 0.4, "max_timestep_boundary": 0.6}

    _, _, found = gradients(loss_of("refl", setup, **options), double, flow_batch(tensors))

    net = TinyFlowNet(0)
    scores = unrolled(net, tensors, num_steps=4, grad_steps=3, stop=3, predict="x0", low=0.4, high=0.6)
    (-scores.mean()).backward()
    for one, parameter in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(DataError):
        loss_of("refl", setup, min_timestep_boundary=0.9)(double, flow_batch(tensors))


def test_the_terms_of_refl_by_hand():
    """v = 0.5 and v_ref = 0.1 everywhere: the KL of the steps at sigma 0.5 and 0.25 is 0.16 / (2 sigma²)."""
    double = ModuleDouble(ConstantNet(0.5), base=ConstantNet(0.1))
    tensors, setup = flow_tensors(), flow_setup(reward=red, sampler="ode")
    options = {"grad_steps": 2, "reward_scale": 0.625, "reward_offset": 0.54, "kl_coef": 2.0, "pretrain_loss_coef": 3.0}

    found = loss_of("refl", setup, **options)(double, flow_batch(tensors))

    score = red(noise(flow_batch(tensors), "initial", SHAPE, CPU) - 0.5, flow_batch(tensors)).mean().item()
    kl = 0.16 / 2 * (1 / 0.25 + 1 / 0.0625) / 2
    target = noise(flow_batch(tensors), "training", SHAPE, CPU) - tensors["latents"]
    pretrain = (0.5 - target).square().mean().item()
    values = {name: float(each) for name, each in found.metrics.items()}
    assert values == pytest.approx(
        {"score": score, "kl_loss": kl, "pretrain_loss": pretrain, "velocity_rms": 0.5, "loss": found.loss.item()},
        rel=1e-5,
    )
    assert found.loss.item() == pytest.approx(-0.625 * (score - 0.54) + 2 * kl + 3 * pretrain, rel=1e-5)


def test_draft_lv_averages_over_further_noises_of_the_last_step():
    tensors, setup = flow_tensors(), flow_setup(reward=red, sampler="ode")
    _, metrics, found = gradients(loss_of("refl", setup, lv_samples=2), module(), flow_batch(tensors))

    net, batch = TinyFlowNet(0), flow_batch(tensors)
    with torch.no_grad():
        x = noise(batch, "initial", SHAPE, CPU)
        for sigma in (1.0, 0.75, 0.5):
            x = x - 0.25 * net(x, torch.full((5,), sigma), tensors["cond.prompt"])
    inputs = [x]
    last = torch.full((5,), 0.25)
    final = (x - 0.25 * net(x, last, tensors["cond.prompt"])).detach()
    inputs += [0.75 * final + 0.25 * noise(batch, "last_step", SHAPE, CPU, at) for at in range(2)]
    scores = [red(each - 0.25 * net(each, last, tensors["cond.prompt"]), batch).mean() for each in inputs]
    (-sum(scores) / 3).backward()
    assert metrics["score"] == pytest.approx(sum(each.item() for each in scores) / 3, rel=1e-5)
    for one, parameter in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reward", [blind, scalar, lambda latents, batch: latents])
def test_a_reward_without_gradients_or_rows_is_refused_by_name(reward):
    with pytest.raises(ContractError, match=reward.__qualname__):
        loss_of("refl", flow_setup(reward=reward))(module(), flow_batch(flow_tensors()))


def test_non_finite_latents_in_refl_name_step_and_rows():
    class Spoilt(TinyFlowNet):
        def forward(self, latents, sigma, prompt):
            bad = (sigma == 0.75)[:, None, None, None] & (prompt[:, :1, None, None] > 50)
            return torch.where(bad, torch.inf, super().forward(latents, sigma, prompt))

    tensors = flow_tensors()
    tensors["cond.prompt"][1] = 100.0

    with pytest.raises(NonFiniteError, match=r"step 1 of 4.*row1"):
        loss_of("refl")(ModuleDouble(Spoilt()), flow_batch(tensors))


def test_the_first_update_has_ratio_one_and_the_policy_gradient():
    tensors, setup, double = flow_tensors(), flow_setup(), module()
    batch = flow_batch(trajectory(setup, tensors, double))

    value, metrics, found = gradients(loss_of("flow_grpo", setup), double, batch)

    net, expected = TinyFlowNet(0), torch.zeros(())
    for row, at in itertools.product(range(5), range(2)):
        x, y = (batch.tensors[name][row, at][None] for name in ("step_latents", "step_next_latents"))
        sigma, dt, first = ((1.0, -0.25, 0.75), (0.5, -0.25, 0.5))[at]
        s2 = 0.49 * sigma / (1 - first)
        v = net(x, torch.tensor([sigma]), tensors["cond.prompt"][[row]])
        mean = x * (1 + s2 * dt / (2 * sigma)) + v * (1 + s2 * (1 - sigma) / (2 * sigma)) * dt
        logprob = Normal(mean, sqrt(-s2 * dt)).log_prob(y).mean()
        expected = expected - tensors["advantages"][row] * logprob / 10
    expected.backward()
    assert value == pytest.approx(-tensors["advantages"].mean().item(), rel=1e-5)
    assert (metrics["ratio"], metrics["clipfrac"]) == (pytest.approx(1), 0)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-12)
    for one, parameter in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-3, atol=1e-6)


def constant_step(*, advantage, toward, reduction="mean", rows=1, velocity=0.0, **setup):
    """One step from sigma 0.5 to 0.25 of dance with std 0.5·sqrt(0.25) = 0.25, whose old velocity is 0.

    `toward`: the new velocity 0.1 makes the sampled latents more likely, or less.
    """
    made = flow_setup(sampler="dance", noise_level=0.5, logprob_reduction=reduction, **setup)
    latents = torch.zeros(rows, 1, *SHAPE)
    step = made.step(torch.full((rows,), 2), latents[:, 0])
    old = made.transition(latents[:, 0], torch.zeros(rows, *SHAPE), step)
    moved = made.transition(latents[:, 0], torch.full((rows, *SHAPE), 0.1), step)
    sampled = old.mean + (moved.mean - old.mean) * (2 if toward else -2)
    tensors = {
        "cond.prompt": torch.zeros(rows, 3),
        "step_index": torch.full((rows, 1), 2),
        "step_latents": latents,
        "step_next_latents": sampled[:, None],
        "old_logprobs": old.logprob(sampled, reduction)[:, None],
        "old_velocities": torch.zeros(rows, 1, *SHAPE),
        "advantages": torch.full((rows,), advantage),
    }
    shift = float((moved.mean - old.mean).flatten()[0])
    return made, flow_batch(tensors), shift / 0.25


@pytest.mark.parametrize(
    ("advantage", "toward", "clipped"),
    [(1.5, True, True), (1.5, False, False), (-1.5, True, False), (-1.5, False, True)],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_clip_acts_on_ratios_that_moved_with_the_advantage(advantage, toward, clipped, reduction):
    """With z the shift in std: log-ratio = 3 z² / 2 toward the sample, -5 z² / 2 away from it, per dimension."""
    setup, batch, z = constant_step(advantage=advantage, toward=toward, reduction=reduction)
    double = ModuleDouble(ConstantNet(0.1))

    value, metrics, found = gradients(loss_of("flow_grpo", setup, clip=1e-3), double, batch)

    ratio = exp((1.5 if toward else -2.5) * z**2 * (8 if reduction == "sum" else 1))
    assert metrics["ratio"] == pytest.approx(ratio, rel=1e-4)
    assert metrics["clipfrac"] == float(clipped)
    bounded = (1.001 if toward else 0.999) if clipped else ratio
    assert value == pytest.approx(-advantage * bounded, rel=1e-4)
    assert bool(found[0].abs().max() > 0) is not clipped


def test_the_default_clip_depends_on_variant_and_reduction():
    for reduction, bound in (("mean", 1e-4), ("sum", 0.2)):
        setup, batch, _ = constant_step(advantage=1.0, toward=True, reduction=reduction)
        far = ModuleDouble(ConstantNet(0.2))

        assert loss_of("flow_grpo", setup)(far, batch).loss.item() == pytest.approx(-1 - bound, rel=1e-6)


def test_guard_removes_the_bias_and_scales_by_std_and_step():
    """log-ratio + D = 3 z²/2 + z²/2 = 2 z², times the std 0.25; the loss over -dt = 0.25."""
    setup, batch, z = constant_step(advantage=-2.0, toward=True)

    found = loss_of("flow_grpo", setup, variant="guard", clip=10.0)(ModuleDouble(ConstantNet(0.1)), batch)

    assert float(found.metrics["ratio"]) == pytest.approx(exp(2 * z**2 * 0.25), rel=1e-5)
    assert float(found.metrics["approx_kl"]) == pytest.approx(z**2 / 2, rel=1e-4)
    assert found.loss.item() == pytest.approx(2 * exp(2 * z**2 * 0.25) / 0.25, rel=1e-5)


@pytest.mark.parametrize(
    ("advantage", "toward", "away"), [(1.0, True, True), (1.0, False, False), (-1.0, True, False), (-1.0, False, True)]
)
def test_dppo_masks_steps_beyond_its_threshold(advantage, toward, away):
    setup, batch, z = constant_step(advantage=advantage, toward=toward)
    ratio = exp((1.5 if toward else -2.5) * z**2)

    for threshold, masked in ((z**2 / 2 * 0.99, away), (z**2 / 2 * 1.01, False)):
        double = ModuleDouble(ConstantNet(0.1))
        loss = loss_of("flow_grpo", setup, variant="dppo", kl_mask_threshold=threshold)
        value, metrics, found = gradients(loss, double, batch) if not masked else (None, None, None)
        if masked:
            result = loss(double, batch)
            assert not result.loss.requires_grad or torch.autograd.grad(result.loss, double.net.v)[0].abs().max() == 0
            assert float(result.metrics["clipfrac"]) == 1
        else:
            assert (value, metrics["clipfrac"]) == (pytest.approx(-advantage * ratio, rel=1e-4), 0)
            assert found[0].abs().max() > 0


@pytest.mark.parametrize(
    ("kl", "reduction"), [("exact", "mean"), ("exact", "sum"), ("flow_grpo", "sum"), ("velocity", "mean")]
)
def test_the_kl_to_the_reference(kl, reduction):
    setup, batch, _ = constant_step(advantage=0.0, toward=True, reduction=reduction)
    double = ModuleDouble(ConstantNet(0.1), base=ConstantNet(0.4))

    value, metrics, found = gradients(loss_of("flow_grpo", setup, kl_coef=0.5, kl=kl), double, batch)

    x, step = torch.zeros(1, *SHAPE), setup.step(torch.tensor([2]), torch.zeros(1, *SHAPE))
    means = [setup.transition(x, torch.full((1, *SHAPE), each), step).mean for each in (0.1, 0.4)]
    exact = kl_divergence(Normal(means[0], 0.25), Normal(means[1], 0.25)).flatten()
    expected = {
        "exact": exact.sum() if reduction == "sum" else exact.mean(),
        "flow_grpo": exact.mean() * 0.25,
        "velocity": torch.tensor(0.09),
    }[kl].item()
    assert metrics["kl_loss"] == pytest.approx(expected, rel=1e-4)
    assert value == pytest.approx(0.5 * expected, rel=1e-4)
    assert found[0].max() < 0  # its velocity is below the reference's


def test_nft_at_the_old_policy_has_the_gradient_by_hand():
    """v = v_old: 2 σ Z (2r - 1) (x_0 - x) / (d w), with r = 0.5 + A / (2 Z)."""
    tensors = {**flow_tensors(1), "advantages": torch.tensor([2.0])}
    double = ModuleDouble(ConstantNet(0.3), average=ConstantNet(0.3))

    value, metrics, found = gradients(loss_of("nft", kl_coef=0.0, advantage_scale=4.0), double, flow_batch(tensors))

    batch = flow_batch(tensors)
    sigma, eps = float(random_sigmas(batch, CPU, **UNIFORM)), noise(batch, "training", SHAPE, CPU)
    error = (1 - sigma) * tensors["latents"] + sigma * eps - sigma * 0.3 - tensors["latents"]
    weight = error.abs().mean()
    torch.testing.assert_close(found[0], (-2 * sigma * 4.0 * 0.5 * error / (8 * weight))[0], rtol=1e-4, atol=1e-6)
    assert metrics["optimality"] == pytest.approx(0.75)
    assert value == pytest.approx(4.0 * float(error.square().mean() / weight), rel=1e-4)


@torch.no_grad()
def test_nft_of_different_policies_by_its_definition():
    tensors, double = flow_tensors(), module()
    found = loss_of("nft", beta=0.4, kl_coef=0.2, advantage_scale=1.5)(double, flow_batch(tensors))

    batch, total = flow_batch(tensors), 0.0
    sigmas, eps = random_sigmas(batch, CPU, **UNIFORM), noise(batch, "training", SHAPE, CPU)
    for row in range(5):
        sigma, x0 = sigmas[row], tensors["latents"][row][None]
        x = (1 - sigma) * x0 + sigma * eps[row]
        v, ref, old = (TinyFlowNet(each)(x, sigma[None], tensors["cond.prompt"][[row]]) for each in range(3))
        r = 0.5 + 0.5 * min(max(float(tensors["advantages"][row]) / 1.5, -1), 1)
        for share, mixed in ((r, 0.6 * old + 0.4 * v), (1 - r, 1.4 * old - 0.4 * v)):
            error = x - sigma * mixed - x0
            total += share * 1.5 / 0.4 * float(error.square().mean() / error.abs().mean()) / 5
        total += 0.2 * float((v - ref).square().mean()) / 5
    assert found.loss.item() == pytest.approx(total, rel=1e-4)


def test_dpo_of_equal_policies_is_log_two():
    double = ModuleDouble(TinyFlowNet(0), base=TinyFlowNet(0))

    value, metrics, found = gradients(loss_of("diffusion_dpo"), double, flow_batch(flow_tensors()))

    assert value == pytest.approx(log(2), rel=1e-6)
    assert metrics["preference_margin"] == 0
    assert max(float(each.abs().max()) for each in found) > 0


@torch.no_grad()
def test_dpo_equals_its_definition_with_common_noise_and_sigma():
    tensors = flow_tensors()
    found = loss_of("diffusion_dpo", beta=3.0)(module(), flow_batch(tensors))

    batch, losses, wins = flow_batch(tensors), [], 0
    sigmas, eps = random_sigmas(batch, CPU, **UNIFORM), noise(batch, "training", SHAPE, CPU)
    for row in range(5):
        gains = []
        for name in ("chosen_latents", "rejected_latents"):
            x0, sigma = tensors[name][row][None], sigmas[row]
            x = (1 - sigma) * x0 + sigma * eps[row]
            v, ref = (TinyFlowNet(each)(x, sigma[None], tensors["cond.prompt"][[row]]) for each in (0, 1))
            target = eps[row] - x0
            gains.append(float((v - target).square().mean() - (ref - target).square().mean()))
        margin = -1.5 * (gains[0] - gains[1])
        losses.append(float(-logsigmoid(torch.tensor(margin))))
        wins += margin > 0
    assert found.loss.item() == pytest.approx(sum(losses) / 5, rel=1e-5)
    assert float(found.metrics["preference_accuracy"]) == pytest.approx(wins / 5)


@pytest.mark.parametrize("distribution", ["logit_normal", "uniform"])
def test_flow_matching_by_its_definition_ignores_guidance(distribution):
    tensors = flow_tensors()
    options = {"time_distribution": distribution, "logit_mean": 0.5, "logit_std": 0.8}
    found = loss_of("flow_matching", flow_setup(guidance_scale=5.0), **options)(module(), flow_batch(tensors))

    batch = flow_batch(tensors)
    sigma = random_sigmas(batch, CPU, distribution=distribution, mean=0.5, std=0.8)
    eps, wide = noise(batch, "training", SHAPE, CPU), sigma[:, None, None, None]
    v = TinyFlowNet(0)((1 - wide) * tensors["latents"] + wide * eps, sigma, tensors["cond.prompt"])
    assert found.loss.item() == pytest.approx((v - (eps - tensors["latents"])).square().mean().item(), rel=1e-5)


def test_dropout_replaces_its_share_of_the_conditioning():
    seen = []

    class Recording(TinyFlowNet):
        def forward(self, latents, sigma, prompt):
            seen.append(prompt)
            return super().forward(latents, sigma, prompt)

    tensors = flow_tensors(400)
    loss_of("flow_matching", conditioning_dropout=0.25)(ModuleDouble(Recording()), flow_batch(tensors))

    dropped = (seen[0] == 0).all(1)
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=0.06)
    torch.testing.assert_close(seen[0][~dropped], tensors["cond.prompt"][~dropped])
    del tensors["uncond.prompt"]
    with pytest.raises(DataError):
        loss_of("flow_matching", conditioning_dropout=0.25)(module(), flow_batch(tensors))


def test_distillation_from_oneself_is_zero():
    tensors, setup, double = flow_tensors(), flow_setup(), module()
    given_ = trajectory(setup, tensors, double)
    given_["teacher_velocities"] = given_["old_velocities"]

    for loss in ("kl", "velocity"):
        assert loss_of("distill", setup, loss=loss)(double, flow_batch(given_)).loss.item() == pytest.approx(
            0, abs=1e-9
        )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_distillation_is_the_kl_of_the_transitions(reduction):
    setup, batch, _ = constant_step(advantage=0.0, toward=True, reduction=reduction)
    batch = replace(batch, tensors={**batch.tensors, "teacher_velocities": torch.full((1, 1, *SHAPE), 0.4)})

    value, metrics, found = gradients(loss_of("distill", setup), ModuleDouble(ConstantNet(0.1)), batch)

    x, step = torch.zeros(1, *SHAPE), setup.step(torch.tensor([2]), torch.zeros(1, *SHAPE))
    means = [setup.transition(x, torch.full((1, *SHAPE), each), step).mean for each in (0.1, 0.4)]
    exact = kl_divergence(Normal(means[0], 0.25), Normal(means[1], 0.25)).flatten()
    assert value == pytest.approx(float(exact.sum() if reduction == "sum" else exact.mean()), rel=1e-4)
    assert metrics["velocity_error"] == pytest.approx(0.09, rel=1e-4)
    assert found[0].max() < 0


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("flow_grpo", "old_logprobs"),
        ("nft", "latents"),
        ("diffusion_dpo", "rejected_latents"),
        ("distill", "step_index"),
    ],
)
def test_a_missing_tensor_is_named(name, missing):
    setup = flow_setup()
    tensors = trajectory(setup, flow_tensors(), module())
    del tensors[missing]

    with pytest.raises(DataError, match=missing):
        loss_of(name, setup)(module(), flow_batch(tensors))


def test_user_objective_gets_its_options_and_is_checked(tmp_path, monkeypatch):
    (tmp_path / "flow_objective_a.py").write_text(
        "from roll_core.spec.train import LossOutput\n"
        "def mine(module, batch, setup, *, scale=1.0):\n"
        "    v = setup.velocity(module, batch.tensors['latents'], batch.tensors['sigma'], batch)\n"
        "    return LossOutput(loss=scale * v.sum() / batch.total_rows, metrics={'mine': 2.0})\n"
        "def wrong(module, batch, setup): return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    tensors = {**flow_tensors(), "sigma": torch.full((5,), 0.5)}

    def result(name, **options):
        function = BoundFunction(target=f"flow_objective_a:{name}", options=options)
        return ObjectiveLoss(function=function, setup=flow_setup())(ModuleDouble(ConstantNet(1.0)), flow_batch(tensors))

    found = result("mine", scale=3.0)
    assert (found.loss.item(), found.metrics["mine"]) == (24.0, 2.0)
    with pytest.raises(ContractError, match="flow_objective_a:wrong"):
        result("wrong")


def test_reward_backpropagation_raises_the_reward():
    tensors, double, setup = flow_tensors(16), module(), flow_setup(reward=red, sampler="ode")
    optimizer, loss = torch.optim.Adam(double.net.parameters(), 1e-2), loss_of("refl", setup, grad_steps=2)
    scores = []
    for _ in range(20):
        optimizer.zero_grad()
        found = loss(double, flow_batch(tensors))
        found.loss.backward()
        optimizer.step()
        scores.append(float(found.metrics["score"]))

    assert scores[-1] > scores[0] + 0.3
