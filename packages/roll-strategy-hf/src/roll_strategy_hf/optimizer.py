"""The optimizer in float32: gradient accumulation, reduction over ranks, clipping, learning-rate schedule, state.

Float32 parameters are updated in place. For bfloat16 and float16 parameters the optimizer keeps float32 master weights:
gradients, state and the update are float32, and the model gets the rounded result.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from roll_core.errors import UnsupportedError
from roll_core.spec.train import ParameterState, StepStats
from roll_modeling.optimizer import (
    clip_factor,
    create_optimizer,
    moments,
    move_averages,
    schedule,
    set_step_count,
    state_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from roll_core.spec.train import TrainingSpec
    from roll_strategy_hf.replicas import Replicas


class ModelOptimizer:
    """Optimizer of one model; owns the gradients, which are views of one flat float32 buffer."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], training: TrainingSpec, replicas: Replicas) -> None:
        self.training, self.replicas = training, replicas
        self.parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.step_count = 0
        self.schedule = schedule(training)
        size = sum(parameter.numel() for parameter in self.parameters.values())
        device = next(iter(self.parameters.values())).device
        self.flat_grad = torch.zeros(size, dtype=torch.float32, device=device)
        self.grads: dict[str, Tensor] = {}
        self.masters: dict[str, Tensor] = {}
        start = 0
        for name, parameter in self.parameters.items():
            self.grads[name] = self.flat_grad[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            if parameter.dtype == torch.float32:
                self.masters[name] = parameter
                parameter.grad = self.grads[name]
            else:
                master = nn.Parameter(parameter.detach().float())
                master.grad = self.grads[name]
                self.masters[name] = master
                parameter.register_post_accumulate_grad_hook(_adder(self.grads[name]))  # type: ignore[no-untyped-call]
        self.torch_optimizer = create_optimizer(self.masters, training)
        self.averages: dict[str, Tensor] = {}
        """Moving average of each master weight, float32; empty without `ema_decay`."""
        if training.ema_decay is not None:
            self.averages = {name: master.detach().clone() for name, master in self.masters.items()}

    def step(self) -> StepStats:
        """Sum gradients over ranks, clip, update, and zero the gradients.

        If the gradient norm is not finite, skips the update and leaves the schedule unchanged (`skipped=True`).
        """
        self.replicas.sum(self.flat_grad)
        norm = self._norm()
        learning_rate = self.training.learning_rate * self.schedule(self.step_count)
        if not math.isfinite(norm):
            self.clear()
            return StepStats(grad_norm=norm, learning_rate=learning_rate, skipped=True)
        factor = clip_factor(norm, self.training.max_grad_norm)
        if factor != 1.0:
            self.flat_grad.mul_(factor)
        for group in self.torch_optimizer.param_groups:
            group["lr"] = learning_rate
        self.torch_optimizer.step()
        self._publish()
        self.clear()
        self.step_count += 1
        if not self.training.ema_per_batch:
            self.move_averages()
        return StepStats(grad_norm=norm, learning_rate=learning_rate)

    def clear(self) -> None:
        """Set the gradients to 0."""
        self.flat_grad.zero_()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving averages into the model's parameters inside this context. Changes no state.

        Raises `UnsupportedError` without `ema_decay`.
        """
        if not self.averages:
            raise UnsupportedError("outputs of the moving average are wanted, but ema_decay is not set")
        self._exchange_averages()
        try:
            yield
        finally:
            self._exchange_averages()
            self._publish()

    @torch.no_grad()
    def _exchange_averages(self) -> None:
        """Exchange float32 parameters with their averages; copy averages into the others, which `_publish` restores."""
        for name, average in self.averages.items():
            parameter = self.parameters[name].data
            if self.masters[name] is self.parameters[name]:
                weights = parameter.clone()
                parameter.copy_(average)
                average.copy_(weights)
            else:
                parameter.copy_(average)

    def move_averages(self) -> None:
        """Move the averages toward the master weights, with the decay of the last step."""
        masters = [self.masters[name] for name in self.averages]
        move_averages([*self.averages.values()], masters, self.training, self.step_count)

    def tensors(self) -> dict[str, Tensor]:
        """Optimizer state, averages, and master weights of parameters that are not float32, by name.

        State is created before step 1.
        """
        tensors: dict[str, Tensor] = {f"average.{name}": average for name, average in self.averages.items()}
        for name, master in self.masters.items():
            for state, tensor in state_tensors(self.torch_optimizer, master).items():
                tensors[f"{state}.{name}"] = tensor
            if master is not self.parameters[name]:
                tensors[f"master.{name}"] = master.detach()
        return tensors

    def restored(self, step_count: int) -> None:
        """Continue at step `step_count` after `tensors()` were overwritten in place."""
        self.step_count = step_count
        set_step_count(self.torch_optimizer, step_count)
        self._publish()
        self.clear()

    def held(self, name: str) -> ParameterState:
        """Live master weight and moments of a parameter."""
        master = self.masters[name]
        exp_avg, exp_avg_sq = moments(self.torch_optimizer, master)
        return ParameterState(master=master.detach(), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)

    def state(self) -> list[Tensor]:
        """All tensors allocated so far: moments, step counts, averages, and masters that are not the parameters."""
        entries = self.torch_optimizer.state.values()
        made = [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]
        return [*made, *self.averages.values()] + [
            master.data for name, master in self.masters.items() if master is not self.parameters[name]
        ]

    def _norm(self) -> float:
        norms = torch._foreach_norm(list(self.grads.values()), 2)
        return math.sqrt(float(torch.stack(norms).double().square().sum()))

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the master weights into the model's parameters, without autograd's notice (see `StrategyModule`)."""
        rounded = [name for name, master in self.masters.items() if master is not self.parameters[name]]
        if rounded:
            torch._foreach_copy_(
                [self.parameters[name].data for name in rounded], [self.masters[name] for name in rounded]
            )


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            total.add_(parameter.grad)
            parameter.grad = None

    return add
