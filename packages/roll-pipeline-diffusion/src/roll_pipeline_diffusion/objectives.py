"""Objectives of flow models, as losses that call the module themselves.

An objective is a function `(module, batch, setup, **options) -> LossOutput`. Its loss is the sum over the batch's rows,
divided by `batch.total_rows`: it does not depend on how rows are split into batches. Random numbers come from the rows'
seeds, see `roll_pipeline_diffusion.programs`. Metrics are means over rows, and over the steps of the window.

| objective | tensors of the batch besides `seed` and conditioning |
|---|---|
| `refl` | none, or `latents` with a pretraining term |
| `flow_grpo` | `step_index`, `step_latents`, `step_next_latents`, `old_logprobs`, `advantages` |
| `flow_grpo` with `guard` or `dppo` | the same, and `old_velocities` |
| `nft` | `latents`, `advantages` |
| `diffusion_dpo` | `chosen_latents`, `rejected_latents` |
| `flow_matching` | `latents` |
| `distill` | `step_index`, `step_latents`, `teacher_velocities` |

`refl`, `flow_grpo` and `distill` train the velocity with classifier-free guidance. The others fit the conditional
velocity.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.nn.functional import logsigmoid

from roll_core.errors import ContractError, DataError
from roll_core.field_docs import document_fields
from roll_core.spec.train import LossOutput
from roll_pipeline_diffusion.programs import (
    conditioning,
    noise,
    per_row,
    random_sigmas,
    require_finite_steps,
    tensor,
    uniform,
)
from roll_pipeline_diffusion.samplers import reduce_dims

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from roll_core.spec.module_program import ModuleBatch, ProgramModule
    from roll_pipeline_diffusion.algorithm_config import BoundFunction, LogprobReduction, TimeDistribution, Variant
    from roll_pipeline_diffusion.programs import FlowSetup
    from roll_pipeline_diffusion.samplers import Transition


class FlowObjective(Protocol):
    """Computes a loss. Parameters after `setup` receive the options of the same names."""

    def __call__(self, module: ProgramModule, batch: ModuleBatch, setup: FlowSetup) -> LossOutput:
        """This batch's share of the objective, with the denominator `batch.total_rows`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveLoss:
    """The `ModuleLoss` of an objective. Adds the metric `loss`."""

    function: BoundFunction
    setup: FlowSetup

    def __call__(self, module: ProgramModule, batch: ModuleBatch) -> LossOutput:
        """Compute this batch's share. Raises `ContractError` if an objective of the user returns something else."""
        output = self.function(module, batch, self.setup)
        if not isinstance(output, LossOutput) or output.loss.shape != ():
            what = (
                f"a loss of shape {list(output.loss.shape)}"
                if isinstance(output, LossOutput)
                else type(output).__name__
            )
            raise ContractError(
                f"the objective {self.function.target} returned {what}, expected a LossOutput with a scalar loss"
            )
        return replace(output, metrics={"loss": output.loss.detach(), **output.metrics})


def refl(
    module: ProgramModule,
    batch: ModuleBatch,
    setup: FlowSetup,
    *,
    grad_steps: int = 1,
    stop: Literal["last", "uniform"] = "last",
    stop_range: list[int] | None = None,
    predict: Literal["x0", "sample"] = "x0",
    min_timestep_boundary: float = 0.0,
    max_timestep_boundary: float = 1.0,
    detach_inputs: bool = False,
    lv_samples: int = 0,
    reward_scale: float = 1.0,
    reward_offset: float = 0.0,
    kl_coef: float = 0.0,
    pretrain_loss_coef: float = 0.0,
    time_distribution: TimeDistribution = "uniform",
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
) -> LossOutput:
    """Reward backpropagation: gradients of a differentiable reward through the last K = `grad_steps` steps.

        loss = -reward_scale · (score - reward_offset) + kl_coef · KL + pretrain_loss_coef · flow matching
        KL   = mean over steps with gradients of mean_d (v - v_ref)² / (2 σ²)

    The trajectory stops at `setup.stop_step`, which follows `stop` and `stop_range`. Its first steps have no gradients.

    Sources: ReFL, arXiv:2304.05977 (K = 1, random stop, prediction of x_0, pretraining term; a hinge of the score
    instead of a scale); DRaFT-K and DRaFT-LV, arXiv:2309.17400 (stop at the last step); ROLL's Reward-FL (K = 4 of 8
    steps, the KL with coefficient 1, one fixed seed for all noise). Here each row has noise of its own.

    Metrics: `score`, `velocity_rms` (of the steps with gradients), `kl_loss` and `pretrain_loss` if they have a
    coefficient. Raises `NonFiniteError`, which names step and rows, `ContractError` for a reward without gradients.
    """
    if setup.reward is None:
        raise DataError("the objective refl needs a differentiable reward, found none")
    sigmas = setup.schedule.sigmas(setup.latent_shape)
    last = setup.schedule.num_steps - 1
    final = last if setup.stop_step is None else setup.stop_step
    latents = noise(batch, "initial", setup.latent_shape, module.device)
    kls_B, rms_B, finite_TB = [], [], []
    velocity = torch.zeros_like(latents)
    for index in range(final + 1):
        trained = index > final - grad_steps and min_timestep_boundary <= sigmas[index] <= max_timestep_boundary
        step = setup.step(torch.full((len(latents),), index, device=latents.device), latents)
        sigma_B, inputs = step.sigma.flatten(), latents.detach() if detach_inputs else latents
        with nullcontext() if trained else torch.no_grad():
            velocity = setup.velocity(module, inputs, sigma_B, batch)
        if trained:
            rms_B.append(_mean(velocity.detach().square()).sqrt())
            if kl_coef:
                with module.base():
                    reference = setup.velocity(module, inputs.detach(), sigma_B, batch)
                kls_B.append(_mean((velocity - reference).square()) / (2 * sigma_B.square()))
        if index == final and predict == "x0":
            latents = latents - step.sigma * velocity
        elif index == last:
            latents = latents + step.dt * velocity
        else:
            sampled = noise(batch, "step", setup.latent_shape, module.device, index)
            latents = setup.transition(latents, velocity, step).sample(sampled)
        finite_TB.append(latents.detach().flatten(1).isfinite().all(1))
    if not rms_B:
        raise DataError(
            f"no step with gradients has a sigma between {min_timestep_boundary} and {max_timestep_boundary}: the"
            f" sigmas are {', '.join(f'{sigma:.3f}' for sigma in sigmas)}, and step {final} is the last"
        )
    predictions = [latents]
    for repetition in range(lv_samples):
        sigma = sigmas[last]
        fresh = noise(batch, "last_step", setup.latent_shape, module.device, repetition)
        noised = (1 - sigma) * latents.detach() + sigma * fresh
        sigma_B = torch.full((len(latents),), sigma, device=latents.device)
        predictions.append(noised - sigma * setup.velocity(module, noised, sigma_B, batch))
    require_finite_steps(finite_TB, batch)
    score_B = torch.stack([_scores(setup.reward, setup.decode, prediction, batch) for prediction in predictions]).mean(
        0
    )
    loss_B = -reward_scale * (score_B - reward_offset)
    metrics = {"score": score_B, "velocity_rms": torch.stack(rms_B).mean(0)}
    if kl_coef:
        metrics["kl_loss"] = torch.stack(kls_B).mean(0)
        loss_B = loss_B + kl_coef * metrics["kl_loss"]
    if pretrain_loss_coef:
        times = {"distribution": time_distribution, "mean": logit_mean, "std": logit_std}
        metrics["pretrain_loss"] = _flow_matching_error(module, batch, setup, times)
        loss_B = loss_B + pretrain_loss_coef * metrics["pretrain_loss"]
    return _shares(loss_B, metrics, batch)


def _scores(
    reward: Callable[[Tensor, ModuleBatch], Tensor],
    decode: Callable[[Tensor], Tensor] | None,
    latents: Tensor,
    batch: ModuleBatch,
) -> Tensor:
    """Scores `[B]` of latents. Raises `ContractError` unless the reward returns them with gradients."""
    score_B = reward(latents if decode is None else decode(latents), batch)
    expected = [len(latents)]
    if not isinstance(score_B, torch.Tensor) or list(score_B.shape) != expected or not score_B.requires_grad:
        what = type(score_B).__name__
        if isinstance(score_B, torch.Tensor):
            what = f"a tensor of shape {list(score_B.shape)} {'with' if score_B.requires_grad else 'without'} gradients"
        raise ContractError(
            f"the reward {_name(reward)} returned {what}, expected scores of shape {expected} with gradients: it must"
            " compute with torch, without no_grad, detach or item"
        )
    return score_B.float()


def _name(function: Any) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def flow_grpo(
    module: ProgramModule,
    batch: ModuleBatch,
    setup: FlowSetup,
    *,
    variant: Variant = "clip",
    clip: float | None = None,
    kl_mask_threshold: float = 1e-5,
    kl_coef: float = 0.0,
    kl: Literal["exact", "flow_grpo", "velocity"] = "exact",
    log_ratio_clamp: float = 20.0,
) -> LossOutput:
    """Policy gradient on the steps of a window: `mean over steps of max(-A ρ, -A clip(ρ, 1 ± clip)) + kl_coef · KL`.

    ρ is the ratio of the step's probability densities under the new and the old weights, to the power 1/d with
    `logprob_reduction: mean`. Variants, with `D = mean_d (mean - mean_old)² / (2 std²)`:

    * `clip`: Flow-GRPO (arXiv:2505.05470), DanceGRPO (arXiv:2505.07818), and MixGRPO (arXiv:2507.21802) by its window.
    * `guard`: GRPO-Guard (arXiv:2510.22319), `ρ = exp((log-ratio + D) · std)`, loss divided by `-dt`: the logarithm has
      mean 0, and the same spread and gradient at every step.
    * `dppo`: Flow-DPPO (arXiv:2606.11025), `-A ρ` without a clip. A step has no gradient where A ρ has moved in the
      direction of A (A > 0 and ρ > 1, or A < 0 and ρ < 1) and D is at least `kl_mask_threshold`.

    KL to the model without adapters:

    * `exact`: `(mean - mean_ref)² / (2 std²)`, reduced as logprobs are.
    * `flow_grpo`: mean over dimensions of `(mean - mean_ref)² / (2 s²)` with `s² = std² / -dt`, as in Flow-GRPO's code,
      which is `-dt` times the KL.
    * `velocity`: mean over dimensions of `(v - v_ref)²`, as Flow-Factory's `v-based`.

    Metrics: `ratio`, `ratio/max`, `ratio/min`, `clipfrac` (steps whose policy term has no gradient), `approx_kl` (D, or
    half the squared log-ratio if the batch has no `old_velocities`), `policy_loss`, `velocity_rms`, `kl_loss` with a
    coefficient.
    """
    advantages_B, old_BW = tensor(batch, "advantages"), tensor(batch, "old_logprobs")
    index_BW, num_steps = tensor(batch, "step_index"), old_BW.shape[1]
    latents_BW, next_BW = tensor(batch, "step_latents"), tensor(batch, "step_next_latents")
    velocities_BW = batch.tensors.get("old_velocities") if variant == "clip" else tensor(batch, "old_velocities")
    bound = _default_clip(variant, setup.logprob_reduction) if clip is None else clip
    loss_B = torch.zeros_like(advantages_B)
    sums: dict[str, Tensor] = {}
    ratios = []
    for index in range(num_steps):
        latents, step = latents_BW[:, index], setup.step(index_BW[:, index], latents_BW[:, index])
        sigma_B = step.sigma.flatten()
        velocity = setup.velocity(module, latents, sigma_B, batch)
        transition = setup.transition(latents, velocity, step)
        log_ratio_B = transition.logprob(next_BW[:, index], setup.logprob_reduction) - old_BW[:, index]
        approx_kl_B = 0.5 * log_ratio_B.detach().square()
        if velocities_BW is not None:
            old = setup.transition(latents, velocities_BW[:, index], step)
            distance_B = _mean(transition.kl_per_dim(old.mean))
            approx_kl_B = distance_B.detach()
        if variant == "guard":
            log_ratio_B = (log_ratio_B + distance_B) * transition.std.flatten()
        ratio_B = log_ratio_B.clamp(-log_ratio_clamp, log_ratio_clamp).exp()
        plain_B = -advantages_B * ratio_B
        if variant == "dppo":
            away_B = torch.where(advantages_B > 0, ratio_B > 1, ratio_B < 1) & (advantages_B != 0)
            stopped_B = away_B & (approx_kl_B >= kl_mask_threshold)
            policy_B = torch.where(stopped_B, plain_B.detach(), plain_B)
        else:
            clipped_B = -advantages_B * ratio_B.clamp(1 - bound, 1 + bound)
            stopped_B = clipped_B > plain_B
            policy_B = torch.maximum(plain_B, clipped_B)
        if variant == "guard":
            policy_B = policy_B / -step.dt.flatten()
        terms = {
            "policy_loss": policy_B,
            "ratio": ratio_B,
            "clipfrac": stopped_B.float(),
            "approx_kl": approx_kl_B,
            "velocity_rms": _mean(velocity.detach().square()).sqrt(),
        }
        loss_B = loss_B + policy_B / num_steps
        if kl_coef:
            with module.base():
                reference = setup.velocity(module, latents, sigma_B, batch)
            if kl == "velocity":
                terms["kl_loss"] = _mean((velocity - reference).square())
            else:
                terms["kl_loss"] = _transition_kl(
                    transition,
                    setup.transition(latents, reference, step),
                    "mean" if kl == "flow_grpo" else setup.logprob_reduction,
                )
                if kl == "flow_grpo":
                    terms["kl_loss"] = terms["kl_loss"] * -step.dt.flatten()
            loss_B = loss_B + kl_coef * terms["kl_loss"] / num_steps
        for name, value_B in terms.items():
            sums[name] = sums.get(name, torch.zeros_like(loss_B)) + value_B.detach() / num_steps
        ratios.append(ratio_B.detach())
    output = _shares(loss_B, sums, batch)
    extremes = {"ratio/max": torch.stack(ratios).max(), "ratio/min": torch.stack(ratios).min()}
    return replace(output, metrics={**output.metrics, **extremes})


def _default_clip(variant: Variant, reduction: LogprobReduction) -> float:
    """Default of `objective_options.clip`."""
    if variant == "guard":
        return 2e-6
    return 1e-4 if reduction == "mean" else 0.2


def _transition_kl(policy: Transition, other: Transition, reduction: LogprobReduction) -> Tensor:
    return reduce_dims(policy.kl_per_dim(other.mean), reduction)


def nft(
    module: ProgramModule,
    batch: ModuleBatch,
    setup: FlowSetup,
    *,
    beta: float = 1.0,
    advantage_scale: float = 5.0,
    kl_coef: float = 1e-4,
    time_distribution: TimeDistribution = "uniform",
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
) -> LossOutput:
    """DiffusionNFT (arXiv:2509.16117): fit an implicit positive and an implicit negative velocity to final samples.

        r    = 1/2 + clip(A / Z, -1, 1) / 2
        v⁺   = v_old + β (v - v_old),   v⁻ = v_old - β (v - v_old)
        loss = Z/β · (r · |x⁺ - x_0|² / w⁺ + (1 - r) · |x⁻ - x_0|² / w⁻) + kl_coef · |v - v_ref|²

    Here `x± = x_σ - σ v±`, |·|² is a mean over dimensions, w± = mean |x± - x_0| without gradient, and `v_old` is the
    moving average of the parameters, which also samples. It moves once per batch (Algorithm 1), so all optimizer steps
    of a batch compare with the policy that sampled it. Neither noise in the sampler nor logprobs are needed. At
    v = v_old the gradient by v is `2 σ Z (2r - 1) (x_0 - x) / (d w)`: toward samples with r above 1/2.

    Metrics: `optimality` (r), `old_distance` (mean squared distance of v and v_old), `velocity_rms`, and `kl_loss` with
    a coefficient.
    """
    setup, latents = replace(setup, guidance_scale=1.0), tensor(batch, "latents")
    times = {"distribution": time_distribution, "mean": logit_mean, "std": logit_std}
    noised, sigma_B, _ = _noised(latents, batch, module, times)
    velocity = setup.velocity(module, noised, sigma_B, batch)
    with module.average():
        old = setup.velocity(module, noised, sigma_B, batch)
    optimality_B = 0.5 + 0.5 * (tensor(batch, "advantages") / advantage_scale).clamp(-1, 1)

    def error(mixed: Tensor) -> Tensor:
        distance = noised - per_row(sigma_B, noised) * mixed - latents
        return _mean(distance.square()) / _mean(distance.detach().abs()).clamp(min=1e-5)

    moved = beta * (velocity - old)
    loss_B = optimality_B * error(old + moved) + (1 - optimality_B) * error(old - moved)
    loss_B = loss_B * advantage_scale / beta
    metrics = {
        "optimality": optimality_B,
        "old_distance": _mean((velocity.detach() - old).square()),
        "velocity_rms": _mean(velocity.detach().square()).sqrt(),
    }
    if kl_coef:
        with module.base():
            reference = setup.velocity(module, noised, sigma_B, batch)
        metrics["kl_loss"] = _mean((velocity - reference).square())
        loss_B = loss_B + kl_coef * metrics["kl_loss"]
    return _shares(loss_B, metrics, batch)


def diffusion_dpo(
    module: ProgramModule,
    batch: ModuleBatch,
    setup: FlowSetup,
    *,
    beta: float = 2000.0,
    time_distribution: TimeDistribution = "uniform",
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
) -> LossOutput:
    """Diffusion-DPO (arXiv:2311.12908 eq. 14) for flows: `-log sigmoid(-β/2 · (Δ_chosen - Δ_rejected))`.

    `Δ = mean_d (v - u)² - mean_d (v_ref - u)²` with the target `u = ε - x_0`. Both latents of a pair get the same noise
    and sigma. All sigmas have the same weight.

    Metrics: `preference_accuracy` (pairs whose chosen latents fit better, compared with the reference), and
    `preference_margin` (`-β/2 · (Δ_chosen - Δ_rejected)`).
    """
    setup = replace(setup, guidance_scale=1.0)
    times = {"distribution": time_distribution, "mean": logit_mean, "std": logit_std}
    gains = []
    for name in ("chosen_latents", "rejected_latents"):
        noised, sigma_B, target = _noised(tensor(batch, name), batch, module, times)
        with module.base():
            reference = setup.velocity(module, noised, sigma_B, batch)
        velocity = setup.velocity(module, noised, sigma_B, batch)
        gains.append(_mean((velocity - target).square()) - _mean((reference - target).square()))
    margin_B = -0.5 * beta * (gains[0] - gains[1])
    metrics = {"preference_accuracy": (margin_B > 0).float(), "preference_margin": margin_B}
    return _shares(-logsigmoid(margin_B), metrics, batch)


def flow_matching(
    module: ProgramModule,
    batch: ModuleBatch,
    setup: FlowSetup,
    *,
    time_distribution: TimeDistribution = "logit_normal",
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    conditioning_dropout: float = 0.0,
) -> LossOutput:
    """Supervised flow matching (arXiv:2210.02747): `mean_d (v - (ε - x_0))²` at a random sigma per row.

    Rows selected by `conditioning_dropout` train with the conditioning `uncond.<name>`.
    """
    times = {"distribution": time_distribution, "mean": logit_mean, "std": logit_std}
    if conditioning_dropout:
        batch = _with_dropout(batch, conditioning_dropout, module)
    return _shares(_flow_matching_error(module, batch, setup, times), {}, batch)


def _with_dropout(batch: ModuleBatch, share: float, module: ProgramModule) -> ModuleBatch:
    """Batch in which this share of the rows has the unconditional conditioning."""
    with_prompt, without = conditioning(batch), conditioning(batch, "uncond.")
    shapes = [
        {name: list(tensor.shape[1:]) for name, tensor in sorted(cond.items())} for cond in (with_prompt, without)
    ]
    if shapes[0] != shapes[1]:
        raise DataError(
            "conditioning_dropout needs uncond.<name> like each cond.<name>: found shapes per row of cond"
            f" {shapes[0]}, of uncond {shapes[1]}"
        )
    dropped_B = uniform(batch, "dropout", module.device) < share
    mixed = {
        f"cond.{name}": torch.where(per_row(dropped_B, tensor), without[name], tensor)
        for name, tensor in with_prompt.items()
    }
    return replace(batch, tensors={**batch.tensors, **mixed})


def distill(
    module: ProgramModule, batch: ModuleBatch, setup: FlowSetup, *, loss: Literal["kl", "velocity"] = "kl"
) -> LossOutput:
    """Distillation on the student's own trajectory: fit a teacher's velocities at the latents that the student visited.

    `kl`: KL of the step's two Gaussians, `(mean - mean_teacher)² / (2 std²)`, reduced as logprobs are. `velocity`: mean
    over dimensions of `(v - v_teacher)²`. Both are means over the steps of the window. Student and teacher must have
    the same latents and schedule.

    Metric: `velocity_error`, the loss of `velocity`.
    """
    index_BW, latents_BW = tensor(batch, "step_index"), tensor(batch, "step_latents")
    teacher_BW = tensor(batch, "teacher_velocities").to(latents_BW.dtype)
    losses_B, errors_B = [], []
    for index in range(index_BW.shape[1]):
        latents, step = latents_BW[:, index], setup.step(index_BW[:, index], latents_BW[:, index])
        velocity = setup.velocity(module, latents, step.sigma.flatten(), batch)
        errors_B.append(_mean((velocity - teacher_BW[:, index]).square()))
        if loss == "kl":
            other = setup.transition(latents, teacher_BW[:, index], step)
            student = setup.transition(latents, velocity, step)
            losses_B.append(_transition_kl(student, other, setup.logprob_reduction))
    error_B = torch.stack(errors_B).mean(0)
    loss_B = torch.stack(losses_B).mean(0) if loss == "kl" else error_B
    return _shares(loss_B, {"velocity_error": error_B}, batch)


def _flow_matching_error(
    module: ProgramModule, batch: ModuleBatch, setup: FlowSetup, times: Mapping[str, Any]
) -> Tensor:
    """Squared error of the conditional velocity at a random sigma, `[B]`."""
    noised, sigma_B, target = _noised(tensor(batch, "latents"), batch, module, times)
    velocity = replace(setup, guidance_scale=1.0).velocity(module, noised, sigma_B, batch)
    return _mean((velocity - target).square())


def _noised(
    latents: Tensor, batch: ModuleBatch, module: ProgramModule, times: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Noised latents, their sigmas `[B]`, and the velocity `ε - x_0`."""
    sigma_B = random_sigmas(batch, module.device, **times)
    fresh = noise(batch, "training", latents.shape[1:], module.device)
    sigma = per_row(sigma_B, latents)
    return (1 - sigma) * latents + sigma * fresh, sigma_B, fresh - latents


def _mean(values: Tensor) -> Tensor:
    return reduce_dims(values, "mean")


def _shares(loss_B: Tensor, metrics: Mapping[str, Tensor], batch: ModuleBatch) -> LossOutput:
    """Sums over rows, divided by the rows of the whole optimizer step."""
    return LossOutput(
        loss=loss_B.sum() / batch.total_rows,
        metrics={name: total.detach().sum() / batch.total_rows for name, total in metrics.items()},
    )


document_fields(__name__)
