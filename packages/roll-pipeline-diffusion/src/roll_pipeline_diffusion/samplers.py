"""Samplers: one step from sigma σ to σ' < σ, as a Gaussian around a mean; logprobs and KL of that Gaussian.

Convention: `x_σ = (1 - σ) x_0 + σ ε`, velocity `v = ε - x_0`, `dt = σ' - σ < 0`. The model's predictions are
`x_0 = x - σ v` and `ε = x + (1 - σ) v`. All arithmetic is in the latents' dtype, float32 in programs, also if the model
computes in bfloat16.

| sampler | marginals | with exact velocities of N(0.5, 0.3²): std after 10, 200 steps |
|---|---|---|
| `ode` | kept as steps grow | 0.247, 0.297 |
| `sde`, noise_level 0.7 | kept as steps grow | 0.282, 0.300 |
| `dance`, noise_level 0.3 | kept as steps grow | 0.262, 0.298 |
| `cps`, noise_level 0.7 | not kept: too narrow | 0.213, 0.251 |

Shapes: `[B, ...]` latents, mean, noise; `[B, 1, ...]` sigmas and std.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi, sin
from typing import TYPE_CHECKING, Protocol

import torch

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from torch import Tensor

    from roll_pipeline_diffusion.algorithm_config import LogprobReduction


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerStep:
    """Sigmas of a step, one per row: rows may be at different steps."""

    sigma: Tensor
    sigma_next: Tensor
    sigma_second: Tensor
    """Second sigma of the schedule. `sde` reads it in the first step, where its noise would be infinite."""

    @property
    def dt(self) -> Tensor:
        """Length of the step in sigma, negative."""
        return self.sigma_next - self.sigma


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Distribution of the next latents: N(mean, std²), independent in all dimensions."""

    mean: Tensor
    std: Tensor
    """`[B, 1, ...]`; 0 in a deterministic step."""

    def sample(self, noise: Tensor) -> Tensor:
        """Next latents from standard normal noise."""
        return self.mean + self.std * noise

    def logprob(self, latents: Tensor, reduction: LogprobReduction) -> Tensor:
        """`-(y - mean)² / (2 std²) - log std - log(2π) / 2` of next latents y, `[B]`: mean or sum over dimensions.

        Flow-GRPO, verl-omni and Flow-Factory take the mean. verl-omni leaves out `2 std²` and the constants for `cps`,
        so that the same clip has another effect there. -inf or NaN in a deterministic step.
        """
        per_dim = -(latents - self.mean).square() / (2 * self.std.square()) - self.std.log() - 0.5 * log(2 * pi)
        return reduce_dims(per_dim, reduction)

    def kl_per_dim(self, mean: Tensor) -> Tensor:
        """`(mean - other)² / (2 std²)`: the exact KL, in either direction, from a Gaussian with the same std."""
        return (self.mean - mean).square() / (2 * self.std.square())


class Sampler(Protocol):
    """One step of a trajectory. It must treat rows independently. Parameters after `step` receive the options of the
    same names."""

    def __call__(self, latents: Tensor, velocity: Tensor, step: SamplerStep) -> Transition:
        """Distribution of the next latents. The std must not depend on latents or velocity."""
        ...


def ode(latents: Tensor, velocity: Tensor, step: SamplerStep) -> Transition:
    """Euler step of the probability-flow ODE: `x + v dt`, without noise."""
    return Transition(mean=latents + velocity * step.dt, std=torch.zeros_like(step.sigma))


def sde(latents: Tensor, velocity: Tensor, step: SamplerStep, *, noise_level: float = 0.7) -> Transition:
    """Euler-Maruyama step of Flow-GRPO's SDE (arXiv:2505.05470), which has the ODE's marginals.

        s    = noise_level · sqrt(σ / (1 - σ))
        mean = x (1 + s² dt / (2σ)) + v (1 + s² (1 - σ) / (2σ)) dt
        std  = s · sqrt(-dt)

    In the first step, s is computed with `1 - σ_2` of the schedule's second sigma, as in Flow-GRPO's code.
    """
    below_one = torch.where(step.sigma < 1, step.sigma, step.sigma_second)
    return _langevin(latents, velocity, step, noise_level**2 * step.sigma / (1 - below_one))


def dance(latents: Tensor, velocity: Tensor, step: SamplerStep, *, noise_level: float = 0.3) -> Transition:
    """Step of DanceGRPO's SDE (arXiv:2505.07818): that of `sde` with the constant `s = noise_level`.

    DanceGRPO's code writes the drift with the score `-(x - (1 - σ) x_0) / σ²`, which is the same.
    """
    return _langevin(latents, velocity, step, torch.full_like(step.sigma, noise_level**2))


def cps(latents: Tensor, velocity: Tensor, step: SamplerStep, *, noise_level: float = 0.7) -> Transition:
    """Coefficients-preserving step of FlowCPS (arXiv:2509.05952): replaces a share of the predicted noise by new noise.

        std  = σ' sin(noise_level · π / 2)
        mean = (1 - σ') (x - σ v) + sqrt(σ'² - std²) (x + (1 - σ) v)

    It keeps the coefficients of data and noise, but not the marginals: see the module's table.
    """
    std = step.sigma_next * sin(noise_level * pi / 2)
    data, noise = latents - step.sigma * velocity, latents + (1 - step.sigma) * velocity
    noise_share = (step.sigma_next.square() - std.square()).clamp(min=0).sqrt()
    return Transition(mean=(1 - step.sigma_next) * data + noise_share * noise, std=std)


def _langevin(latents: Tensor, velocity: Tensor, step: SamplerStep, variance: Tensor) -> Transition:
    """Step of the SDE whose noise has this variance per unit of sigma."""
    half = variance / (2 * step.sigma)
    mean = latents * (1 + half * step.dt) + velocity * (1 + half * (1 - step.sigma)) * step.dt
    return Transition(mean=mean, std=(variance * -step.dt).sqrt())


def reduce_dims(values: Tensor, reduction: LogprobReduction) -> Tensor:
    """Mean or sum over all dimensions but the first, `[B]`."""
    flat = values.flatten(1)
    return flat.mean(1) if reduction == "mean" else flat.sum(1)


document_fields(__name__)
