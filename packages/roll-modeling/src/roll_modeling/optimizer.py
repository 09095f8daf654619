"""AdamW, the learning rate schedule and the moving average, for strategies that update parameters themselves."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from torch import nn

from roll_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from roll_core.spec.train import TrainingSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of a parameter's moments in torch's optimizer state, next to `step`."""
OWN_ARGUMENTS = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
"""Arguments of transformers' schedules that are not part of `lr_scheduler_kwargs`."""


def adamw(parameters: Iterable[Tensor], training: TrainingSpec) -> torch.optim.AdamW:
    """Create AdamW for float32 leaf tensors. Vectors (biases and norms) get no weight decay."""
    each = list(parameters)
    groups = [
        {"params": [one for one in each if one.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [one for one in each if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        fused=True,
    )


def moments(optimizer: torch.optim.AdamW, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """A parameter's moments (`exp_avg`, `exp_avg_sq`), created in the fused kernel's layout before the first step."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state["exp_avg"], state["exp_avg_sq"]


def average_decay(training: TrainingSpec, step: int) -> float:
    """Decay of the moving average after step `step`, counted from 1: min(`ema_decay`, `ema_ramp` × step).

    With a ramp, early averages follow the parameters quickly: the schedule of DiffusionNFT (arXiv:2509.16117).
    """
    decay = training.ema_decay or 0.0
    return decay if training.ema_ramp is None else min(decay, training.ema_ramp * step)


def clip_factor(norm: float, limit: float) -> float:
    """Factor that clips gradients of global norm `norm` to `limit`; a limit of 0 disables clipping."""
    return limit / (norm + 1e-6) if limit and norm > limit else 1.0


def schedule(training: TrainingSpec) -> Callable[[int], float]:
    """Learning rate factor as a pure function of the number of completed steps, computed as in transformers.

    Raises `UnsupportedError` for `lr_scheduler_kwargs` that the schedule does not have, or rejects.
    """
    from transformers import SchedulerType, get_scheduler
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    name, kwargs = training.lr_scheduler_type, dict(training.lr_scheduler_kwargs)
    # Absolute rates such as min_lr become factors of the probe's. With a learning rate of 0 the factor has no effect.
    probe = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=training.learning_rate or 1.0)
    try:
        known = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters.keys() - OWN_ARGUMENTS
        if unknown := kwargs.keys() - known:  # transformers ignores them for some schedules
            raise ValueError(f"{min(unknown)} is unknown, expected {' or '.join(sorted(known)) or 'none'}")
        found = get_scheduler(
            name,
            probe,
            num_warmup_steps=training.warmup_steps,
            num_training_steps=max(training.num_steps, 1),
            scheduler_specific_kwargs=kwargs,
        )
    except ValueError as error:
        raise UnsupportedError(f"lr_scheduler_type {name} with lr_scheduler_kwargs {kwargs}: {error}") from error
    factor: Callable[[int], float] = found.lr_lambdas[0]
    return factor


@torch.no_grad()
def move_averages(averages: Sequence[Tensor], masters: Sequence[Tensor], training: TrainingSpec, step: int) -> None:
    """Moving average after optimizer step `step`, in place: `average = d × average + (1 - d) × master`."""
    if averages:
        weight = 1 - average_decay(training, step)
        torch._foreach_lerp_(list(averages), [each.detach() for each in masters], weight)


@torch.no_grad()
def exchange(some: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """Exchange the content of tensors of equal shapes, pair by pair, in place."""
    for one, other in zip(some, others, strict=True):
        kept = one.detach().clone()
        one.data.copy_(other)
        other.data.copy_(kept)
