"""AdamW on this rank's shares: the step is elementwise, so only the norm of the gradient needs the other ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from roll_core.spec.train import StepStats
from roll_modeling.optimizer import MOMENTS, adamw, clip_factor, moments, schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from roll_core.spec.train import TrainingSpec


class ShardedAdamW:
    """The optimizer of a sharded model, whose parameters are DTensors in float32."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], training: TrainingSpec, device: str) -> None:
        """`device` is that of the collectives."""
        self.training, self.device = training, device
        self.parameters = {name: each for name, each in parameters.items() if each.requires_grad}
        # The same memory as plain tensors: torch steps those without a detour through DTensor for each operation.
        self.shares = {name: local(each) for name, each in self.parameters.items()}
        self.num_holders = torch.tensor([num_holders(each) for each in self.parameters.values()], dtype=torch.float64)
        self.step_count = 0
        self.schedule = schedule(training)
        self.torch_optimizer = adamw(self.shares.values(), training)

    def step(self) -> StepStats:
        """Clip, step, clear. A gradient that is not finite changes nothing, the schedule included. Collective."""
        gradients = [self._gradient(name) for name in self.parameters]
        norm = self._norm(gradients)
        learning_rate = self.training.learning_rate * self.schedule(self.step_count)
        skipped = not math.isfinite(norm)
        if not skipped:
            factor = clip_factor(norm, self.training.max_grad_norm)
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            for group in self.torch_optimizer.param_groups:
                group["lr"] = learning_rate
            self.torch_optimizer.step()
            self.step_count += 1
        self.clear()
        return StepStats(grad_norm=norm, learning_rate=learning_rate, skipped=skipped)

    def clear(self) -> None:
        """Drop the gradients."""
        for name, parameter in self.parameters.items():
            parameter.grad = self.shares[name].grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Moments by name, sharded as their parameters are; made if no step was taken yet."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for moment, share in zip(MOMENTS, moments(self.torch_optimizer, self.shares[name]), strict=True):
                found[f"{moment}.{name}"] = like(parameter, share)
        return found

    def restored(self, step_count: int) -> None:
        """Call after `tensors()` were overwritten in place: continue at this step."""
        self.step_count = step_count
        for share in self.shares.values():
            self.torch_optimizer.state[share]["step"].fill_(float(step_count))
        self.clear()

    def gradients(self) -> list[Tensor]:
        """This rank's shares, of those that there are."""
        return [local(each.grad) for each in self.parameters.values() if each.grad is not None]

    def states(self) -> list[Tensor]:
        """Moments, as far as a step has made them, and numbers of steps."""
        states = self.torch_optimizer.state.values()
        return [each for state in states for each in state.values() if isinstance(each, torch.Tensor)]

    def _gradient(self, name: str) -> Tensor:
        """This rank's share of it, given to the torch optimizer; zeros where no microbatch came."""
        share, found = self.shares[name], self.parameters[name].grad
        share.grad = gradient = torch.zeros_like(share) if found is None else local(found)
        return gradient

    def _norm(self, gradients: list[Tensor]) -> float:
        norms = torch._foreach_norm(gradients, 2)
        # Meshes differ: each share counts as often as there are ranks that hold it, and all of them add up.
        squares = torch.stack(norms).double().square() / self.num_holders.to(norms[0].device)
        # One number, and in float32: not every backend has float64.
        total = squares.sum().to(self.device, torch.float32)
        dist.all_reduce(total)
        return math.sqrt(float(total))


def num_holders(tensor: Tensor) -> int:
    """Ranks of the role that hold the same share of a DTensor."""
    if not isinstance(tensor, DTensor):
        raise TypeError(f"a sharded model's tensor is a DTensor, not a {type(tensor).__name__}")
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return dist.get_world_size() // math.prod(size for placement, size in sizes if not placement.is_replicate())


def local(tensor: Tensor) -> Tensor:
    """This rank's share of a DTensor: the same memory, without gradient."""
    if not isinstance(tensor, DTensor):
        raise TypeError(f"a sharded model's tensor is a DTensor, not a {type(tensor).__name__}")
    return tensor._local_tensor.detach()


def like(parameter: Tensor, share: Tensor) -> DTensor:
    """The DTensor of which this rank holds `share`, spread as `parameter` is."""
    if not isinstance(parameter, DTensor):
        raise TypeError(f"a sharded model's tensor is a DTensor, not a {type(parameter).__name__}")
    return DTensor.from_local(
        share,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
