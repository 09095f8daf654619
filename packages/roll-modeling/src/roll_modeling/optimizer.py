"""The optimizer and its state, the learning rate schedule and the moving average.

For strategies that update parameters themselves.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING

import torch
from torch import nn

from roll_core.algorithms.optimizers import adamw
from roll_core.errors import ContractError, UnsupportedError
from roll_core.spec.algorithms import bind_options
from roll_core.spec.train import OptimizerFactory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.train import TrainingSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of a parameter's moments in torch's optimizer state, next to `step`."""
OWN_ARGUMENTS = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
"""Arguments of transformers' schedules that are not part of `lr_scheduler_kwargs`."""


def create_optimizer(parameters: Mapping[str, Tensor], training: TrainingSpec) -> torch.optim.Optimizer:
    """Create the optimizer of `training` for float32 leaf tensors.

    Raises `ContractError` if its function returns no optimizer of exactly these tensors.
    """
    module, _, name = (training.optimizer or f"{adamw.__module__}:{adamw.__name__}").partition(":")
    function: OptimizerFactory = getattr(importlib.import_module(module), name)
    optimizer = bind_options(function, OptimizerFactory, training.optimizer_kwargs)(parameters, training)
    groups = getattr(optimizer, "param_groups", ())
    stepped = [id(tensor) for group in groups for tensor in group["params"]]
    if not isinstance(optimizer, torch.optim.Optimizer) or sorted(stepped) != sorted(map(id, parameters.values())):
        raise ContractError(
            f"{training.optimizer} returned {type(optimizer).__name__} of {len(stepped)} parameters, expected a"
            f" torch.optim.Optimizer of the {len(parameters)} given ones"
        )
    return optimizer


def state_tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """A parameter's state by name, without `step`. Before the first step it is created, by a step that changes nothing.

    Raises `ContractError` for state that is no tensor, which a checkpoint cannot have.
    """
    if isinstance(optimizer, torch.optim.AdamW):
        return dict(zip(MOMENTS, moments(optimizer, parameter), strict=True))
    if not any(optimizer.state.values()):
        _create_state(optimizer)
    state = dict(optimizer.state.get(parameter, {}))
    state.pop("step", None)
    if wrong := [name for name, value in state.items() if value is not None and not isinstance(value, torch.Tensor)]:
        raise ContractError(f"{type(optimizer).__name__} has state that is no tensor: {', '.join(wrong)}")
    return {name: value for name, value in state.items() if value is not None}


def set_step_count(optimizer: torch.optim.Optimizer, step_count: int) -> None:
    """Set the number of completed steps in the state of every parameter."""
    for state in optimizer.state.values():
        if isinstance(step := state.get("step"), torch.Tensor):
            step.fill_(float(step_count))
        elif step is not None:
            state["step"] = step_count


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer create its state by a step with learning rate 0 and gradients of 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    gradients = [tensor.grad for tensor in tensors]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient
    set_step_count(optimizer, 0)


def moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """A parameter's moments (`exp_avg`, `exp_avg_sq`), created in the fused kernel's layout before the first step.

    `optimizer` is AdamW of any library: apex and DeepSpeed have fused ones. Raises `UnsupportedError` for another one.
    """
    state = optimizer.state.get(parameter, {})
    if not ({*MOMENTS} <= state.keys() if state else "betas" in optimizer.defaults):
        raise UnsupportedError(f"a portable state has the moments of AdamW, which {type(optimizer).__name__} lacks")
    if not state:
        state = optimizer.state[parameter]
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
        scheduler = get_scheduler(
            name,
            probe,
            num_warmup_steps=training.warmup_steps,
            num_training_steps=max(training.num_steps, 1),
            scheduler_specific_kwargs=kwargs,
        )
    except ValueError as error:
        raise UnsupportedError(f"lr_scheduler_type {name} with lr_scheduler_kwargs {kwargs}: {error}") from error
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor


@torch.no_grad()
def move_averages(averages: Sequence[Tensor], masters: Sequence[Tensor], training: TrainingSpec, step: int) -> None:
    """Moving average after optimizer step `step`, in place: `average = d × average + (1 - d) × master`."""
    if averages:
        weight = 1 - average_decay(training, step)
        torch._foreach_lerp_(list(averages), [parameter.detach() for parameter in masters], weight)


@torch.no_grad()
def exchange(some: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """Exchange the content of tensors of equal shapes, pair by pair, in place."""
    for one, other in zip(some, others, strict=True):
        first = one.detach().clone()
        one.data.copy_(other)
        other.data.copy_(first)
