"""AdamW in float32 on summed gradients: accumulation, reduction over ranks, clipping, schedule, state.

Parameters in float32 are stepped in place. For bfloat16 and float16 parameters there are float32 masters: gradients are
added up, the moments kept and the step taken in float32, and the model gets the rounded result.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roll_core.spec.train import StepStats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from roll_core.builtin.hf.replicas import Replicas
    from roll_core.spec.train import TrainingSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """The optimizer of one model: owns its gradients, which lie in one flat float32 buffer."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], training: TrainingSpec, replicas: Replicas) -> None:
        self.training, self.replicas = training, replicas
        self.parameters = {name: each for name, each in parameters.items() if each.requires_grad}
        self.step_count = 0
        self.schedule = schedule(training)
        size = sum(each.numel() for each in self.parameters.values())
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
        decayed = [self.masters[name] for name, each in self.parameters.items() if each.ndim >= 2]
        # Biases and norms, which are vectors, are not decayed.
        others = [self.masters[name] for name, each in self.parameters.items() if each.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.torch_optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_epsilon,
            fused=True,
        )

    def step(self) -> StepStats:
        """Sum over ranks, clip, step, clear. A gradient that is not finite changes nothing, the schedule included."""
        self.replicas.sum(self.flat_grad)
        norm = self._norm()
        learning_rate = self.training.learning_rate * self.schedule(self.step_count)
        if not math.isfinite(norm):
            self.flat_grad.zero_()
            return StepStats(grad_norm=norm, learning_rate=learning_rate, skipped=True)
        limit = self.training.max_grad_norm
        if limit and norm > limit:
            self.flat_grad.mul_(limit / (norm + 1e-6))
        for group in self.torch_optimizer.param_groups:
            group["lr"] = learning_rate
        self.torch_optimizer.step()
        self._publish()
        self.flat_grad.zero_()
        self.step_count += 1
        return StepStats(grad_norm=norm, learning_rate=learning_rate)

    def tensors(self) -> dict[str, Tensor]:
        """Moments, and masters where the parameters are not float32, by name; made if no step was taken yet."""
        found: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            for moment, tensor in zip(MOMENTS, self._moments(master), strict=True):
                found[f"{moment}.{name}"] = tensor
            if master is not self.parameters[name]:
                found[f"master.{name}"] = master.detach()
        return found

    def restored(self, step_count: int) -> None:
        """Call after `tensors()` were overwritten in place: continue at this step."""
        self.step_count = step_count
        for master in self.masters.values():
            self.torch_optimizer.state[master]["step"].fill_(float(step_count))
        self._publish()
        self.flat_grad.zero_()

    def memory(self) -> dict[str, int]:
        """Bytes of gradients and of optimizer state."""
        state = sum(
            each.nbytes
            for entry in self.torch_optimizer.state.values()
            for each in entry.values()
            if isinstance(each, torch.Tensor)
        )
        masters = sum(each.nbytes for name, each in self.masters.items() if each is not self.parameters[name])
        return {"grads": self.flat_grad.nbytes, "optimizer": state + masters}

    def _moments(self, master: Tensor) -> tuple[Tensor, Tensor]:
        state: dict[str, Any] = self.torch_optimizer.state[master]
        if not state:
            # As torch lays them out for its fused kernel.
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(master, memory_format=torch.preserve_format)
        return state["exp_avg"], state["exp_avg_sq"]

    def _norm(self) -> float:
        norms = torch._foreach_norm(list(self.grads.values()), 2)
        return math.sqrt(float(torch.stack(norms).double().square().sum()))

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the masters into the model."""
        rounded = [name for name, master in self.masters.items() if master is not self.parameters[name]]
        if rounded:
            torch._foreach_copy_([self.parameters[name] for name in rounded], [self.masters[name] for name in rounded])


def schedule(training: TrainingSpec) -> Callable[[int], float]:
    """The factor on the learning rate as a pure function of the number of steps done, as transformers computes it."""
    from transformers import get_scheduler

    probe = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    found = get_scheduler(
        training.lr_scheduler_type,
        probe,
        num_warmup_steps=training.warmup_steps,
        num_training_steps=max(training.num_steps, 1),
        scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs),
    )
    factor: Callable[[int], float] = found.lr_lambdas[0]
    return factor


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            total.add_(parameter.grad)
            parameter.grad = None

    return add
