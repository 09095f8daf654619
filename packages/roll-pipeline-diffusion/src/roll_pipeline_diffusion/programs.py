"""Module programs of flow models: sampling of trajectories, and velocities along stored ones.

    row seed ─► noise ─► step 0 ─► ... ─► step T - 1 ─► latents
                          └─ steps of the window: latents, next latents, logprobs

Tensors of a batch, B rows, W steps of the window:

| name | shape | content |
|---|---|---|
| `seed` | `[B]` int64 | source of the row's random numbers, with the epoch; new in every update |
| `cond.<name>`, `uncond.<name>` | `[B, ...]` | the model's conditioning, with and without the prompt |
| `latents` | `[B, ...]` | final latents, or latents of the data |
| `step_index` | `[B, W]` int64 | steps in the schedule |
| `step_latents`, `step_next_latents` | `[B, W, ...]` | latents before and after the steps |
| `old_logprobs` | `[B, W]` | logprobs of the next latents under the weights that sampled |
| `old_velocities`, `teacher_velocities` | `[B, W, ...]` | velocities of these weights, and of a teacher |
| `advantages` | `[B]` | |
| `chosen_latents`, `rejected_latents` | `[B, ...]` | a pair |

Random numbers come from the rows' seeds through generators on the CPU: one per row, purpose and step. They therefore
depend neither on how rows are batched, nor on ranks or devices. Two rows with one seed have the same noise. A further
epoch of an update has noise of its own.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from roll_core.errors import ContractError, DataError, NonFiniteError
from roll_core.field_docs import document_fields
from roll_pipeline_diffusion.samplers import SamplerStep, Transition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from roll_core.spec.module_program import ModuleBatch, ProgramModule
    from roll_pipeline_diffusion.algorithm_config import BoundFunction, LogprobReduction, TimeDistribution
    from roll_pipeline_diffusion.schedules import SigmaSchedule

Purpose = Literal["initial", "step", "training", "time", "dropout", "last_step"]
_STREAMS: dict[Purpose, int] = {"initial": 0, "step": 1, "training": 2, "time": 3, "dropout": 4, "last_step": 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSetup:
    """Settings shared by programs and objectives. Picklable if its functions are."""

    schedule: SigmaSchedule
    latent_shape: tuple[int, ...]
    """Shape of a row's latents: `(C, H, W)` or `(C, F, H, W)`."""
    sampler: BoundFunction
    guidance_scale: float = 1.0
    logprob_reduction: LogprobReduction = "mean"
    decode: Callable[[Tensor], Tensor] | None = None
    """Latents to what `reward` scores. None: `reward` scores latents."""
    reward: Callable[[Tensor, ModuleBatch], Tensor] | None = None
    """Differentiable reward, `[B]` scores."""
    stop_step: int | None = None
    """Last step of `refl` in this update, see `windows.stop_step`. None: the schedule's last."""

    def velocity(self, module: ProgramModule, latents: Tensor, sigma_B: Tensor, batch: ModuleBatch) -> Tensor:
        """The model's velocity in the latents' dtype, with classifier-free guidance.

        `v = v_uncond + g · (v_cond - v_uncond)`. Raises `DataError` without unconditional conditioning.
        """
        velocity = self._call(module, latents, sigma_B, conditioning(batch))
        if self.guidance_scale == 1.0:
            return velocity
        if not (without := conditioning(batch, "uncond.")):
            raise DataError(
                f"guidance_scale is {self.guidance_scale}, but the batch has no tensors uncond.<name>: provide"
                " unconditional conditioning, or set guidance_scale 1"
            )
        unguided = self._call(module, latents, sigma_B, without)
        return unguided + self.guidance_scale * (velocity - unguided)

    def _call(self, module: ProgramModule, latents: Tensor, sigma_B: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        velocity: Tensor = module(latents, sigma_B, **cond)
        if velocity.shape != latents.shape:
            raise ContractError(
                f"the model returned a velocity of shape {list(velocity.shape)}, expected that of the latents,"
                f" {list(latents.shape)}"
            )
        return velocity.to(latents.dtype)

    def sigmas(self, like: Tensor) -> Tensor:
        """The schedule's sigmas `[T + 1]`, on the device and in the dtype of `like`."""
        return torch.tensor(self.schedule.sigmas(self.latent_shape), dtype=like.dtype, device=like.device)

    def step(self, index_B: Tensor, latents: Tensor) -> SamplerStep:
        """Sigmas of the steps at which the rows are."""
        sigmas = self.sigmas(latents)
        return SamplerStep(
            sigma=per_row(sigmas[index_B], latents),
            sigma_next=per_row(sigmas[index_B + 1], latents),
            sigma_second=sigmas[1].expand(len(latents)).reshape(-1, *[1] * (latents.dim() - 1)),
        )

    def transition(self, latents: Tensor, velocity: Tensor, step: SamplerStep) -> Transition:
        """The sampler's step. Raises `ContractError` if a sampler of the user returns something else."""
        transition = self.sampler(latents, velocity, step)
        if not isinstance(transition, Transition) or transition.mean.shape != latents.shape:
            what = list(transition.mean.shape) if isinstance(transition, Transition) else type(transition).__name__
            raise ContractError(
                f"the sampler {self.sampler.target} returned {what}, expected a Transition with a mean of shape"
                f" {list(latents.shape)}"
            )
        return transition


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingProgram:
    """Sample latents by all T steps: the sampler's noise in the window, the ODE elsewhere.

    Returns `latents`, and with a window `step_index`, `step_latents`, `step_next_latents` and `old_logprobs`. The
    logprobs are those of the module that trains, in its compute dtype: the ratio of the first update is 1.
    """

    setup: FlowSetup
    window: tuple[int, ...] = ()
    """Steps with noise, ascending. Empty: only the ODE, as for evaluation."""
    weights: Literal["trained", "average", "base"] = "trained"
    """Weights that sample: the trained ones, their moving average (DiffusionNFT's old policy), or those without
    adapters."""
    keep_velocities: bool = False
    """Return `old_velocities`, which some objectives need."""

    def __call__(self, module: ProgramModule, batch: ModuleBatch) -> Mapping[str, Tensor]:
        """Sample. Raises `NonFiniteError`, which names the first step with non-finite latents, and its rows."""
        setup, num_steps = self.setup, self.setup.schedule.num_steps
        latents = noise(batch, "initial", setup.latent_shape, module.device)
        records: dict[str, list[Tensor]] = {}
        finite_TB: list[Tensor] = []
        with torch.no_grad(), self._weights(module):
            for index in range(num_steps):
                index_B = torch.full((len(latents),), index, device=latents.device)
                step = setup.step(index_B, latents)
                velocity = setup.velocity(module, latents, step.sigma.flatten(), batch)
                if index in self.window:
                    transition = setup.transition(latents, velocity, step)
                    sampled = transition.sample(noise(batch, "step", setup.latent_shape, module.device, index))
                    record = {
                        "step_index": index_B,
                        "step_latents": latents,
                        "step_next_latents": sampled,
                        "old_logprobs": transition.logprob(sampled, setup.logprob_reduction),
                    }
                    if self.keep_velocities:
                        record["old_velocities"] = velocity
                    for name, value in record.items():
                        records.setdefault(name, []).append(value)
                    latents = sampled
                else:
                    latents = latents + velocity * step.dt
                finite_TB.append(latents.flatten(1).isfinite().all(1))
        require_finite_steps(finite_TB, batch)
        return {"latents": latents, **{name: torch.stack(values, dim=1) for name, values in records.items()}}

    def _weights(self, module: ProgramModule) -> AbstractContextManager[None]:
        if self.weights == "trained":
            return nullcontext()
        return module.average() if self.weights == "average" else module.base()


@dataclass(frozen=True, slots=True, kw_only=True)
class VelocityProgram:
    """Velocities at stored `step_latents`, for example a teacher's on the student's trajectory."""

    setup: FlowSetup
    name: str = "teacher_velocities"
    """Name of the result."""

    def __call__(self, module: ProgramModule, batch: ModuleBatch) -> Mapping[str, Tensor]:
        """Velocities `[B, W, ...]`."""
        latents_BW, index_BW = tensor(batch, "step_latents"), tensor(batch, "step_index")
        velocities = []
        with torch.no_grad():
            for index in range(index_BW.shape[1]):
                step = self.setup.step(index_BW[:, index], latents_BW[:, index])
                velocities.append(self.setup.velocity(module, latents_BW[:, index], step.sigma.flatten(), batch))
        return {self.name: torch.stack(velocities, dim=1)}


def tensor(batch: ModuleBatch, name: str) -> Tensor:
    """A tensor of the batch. Raises `DataError` if it is missing."""
    if name not in batch.tensors:
        raise DataError(f"the batch has no tensor {name!r}, found {', '.join(sorted(batch.tensors)) or 'none'}")
    return batch.tensors[name]


def conditioning(batch: ModuleBatch, prefix: str = "cond.") -> dict[str, Tensor]:
    """Tensors of the batch whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in batch.tensors.items() if name.startswith(prefix)}


def per_row(values_B: Tensor, like: Tensor) -> Tensor:
    """Reshape `[B]` to `[B, 1, ...]`, which broadcasts to `like`."""
    return values_B.reshape(-1, *[1] * (like.dim() - 1))


def noise(batch: ModuleBatch, purpose: Purpose, shape: Sequence[int], device: torch.device, index: int = 0) -> Tensor:
    """Standard normal numbers `[B, *shape]`, float32, from the rows' seeds. `index` is a step or a repetition."""
    rows = [
        generator.standard_normal(tuple(shape), dtype=np.float32) for generator in _generators(batch, purpose, index)
    ]
    return torch.from_numpy(np.stack(rows)).to(device)


def uniform(batch: ModuleBatch, purpose: Purpose, device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1), `[B]`, float32, from the rows' seeds."""
    rows = [generator.random((), dtype=np.float32) for generator in _generators(batch, purpose, 0)]
    return torch.from_numpy(np.stack(rows)).to(device)


def random_sigmas(
    batch: ModuleBatch, device: torch.device, *, distribution: TimeDistribution, mean: float, std: float
) -> Tensor:
    """Random sigmas `[B]`: uniform in (0, 1), or `sigmoid(mean + std · N(0, 1))` (arXiv:2403.03206 eq. 19)."""
    if distribution == "uniform":
        return uniform(batch, "time", device).clamp(min=1e-5)
    return torch.sigmoid(mean + std * noise(batch, "time", (), device))


def _generators(batch: ModuleBatch, purpose: Purpose, index: int) -> list[np.random.Generator]:
    seeds = tensor(batch, "seed").tolist()
    parts = [_STREAMS[purpose], index, *([batch.epoch] if batch.epoch else [])]
    return [np.random.default_rng([seed & (2**64 - 1), *parts]) for seed in seeds]


def require_finite_steps(finite_TB: Sequence[Tensor], batch: ModuleBatch) -> None:
    """Raise `NonFiniteError` if latents were not finite after some step. One transfer from the device for all steps."""
    finite = torch.stack(list(finite_TB)).cpu()
    if not bool(finite.all()):
        step = int((~finite.all(1)).nonzero()[0])
        rows = [name for name, good in zip(batch.ids, finite[step].tolist(), strict=True) if not good]
        raise NonFiniteError(
            f"latents are NaN or infinite after step {step} of {len(finite_TB)}, in {len(rows)} of"
            f" {len(batch.ids)} rows: {', '.join(rows[:8])}{', ...' if len(rows) > 8 else ''}"
        )


document_fields(__name__)
