"""The optimizer on this rank's shards.

Updates are elementwise, so that only the gradient norm requires communication. Muon is the exception: its matrices are
gathered one after another, and each rank orthogonalises whole matrices (Liu et al., arXiv:2502.16982, section 2.3).
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from roll_core.algorithms.optimizers import Joint
from roll_core.errors import UnsupportedError
from roll_core.spec.train import ParameterState, StepStats
from roll_modeling.optimizer import (
    clip_factor,
    create_optimizer,
    exchange,
    moments,
    move_averages,
    schedule,
    set_step_count,
    state_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from roll_core.spec.train import PortableState, TrainingSpec


class ShardedOptimizer:
    """Optimizer of a sharded model, whose parameters are DTensors in float32."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], training: TrainingSpec, device: str) -> None:
        """`device` is the device of the collectives."""
        self.training, self.device = training, device
        self.parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        # Plain tensors on the same memory: for DTensors, torch would dispatch each operation separately.
        self.shares = {name: local(parameter) for name, parameter in self.parameters.items()}
        held_on = next(iter(self.shares.values())).device
        holders = [num_holders(parameter) for parameter in self.parameters.values()]
        self.num_holders = torch.tensor(holders, dtype=torch.float64, device=held_on)
        self.step_count = 0
        self.schedule = schedule(training)
        self.torch_optimizer = create_optimizer(self.shares, training)
        self.averages: dict[str, Tensor] = {}
        """Moving average of each shard; empty without `ema_decay`."""
        if training.ema_decay is not None:
            self.averages = {name: share.clone() for name, share in self.shares.items()}

    def step(self) -> StepStats:
        """Clip gradients, run the optimizer step and clear the gradients. Collective.

        If the gradient norm is not finite, neither weights, moments nor the schedule change.
        """
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
            self._update()
            self.step_count += 1
            if not self.training.ema_per_batch:
                self.move_averages()
        self.clear()
        return StepStats(grad_norm=norm, learning_rate=learning_rate, skipped=skipped)

    def _update(self) -> None:
        torch_optimizer = self.torch_optimizer
        for optimizer in torch_optimizer.parts if isinstance(torch_optimizer, Joint) else (torch_optimizer,):
            if isinstance(optimizer, torch.optim.Muon):
                self._step_muon(optimizer)
            else:
                optimizer.step()

    @torch.no_grad()
    def _step_muon(self, muon: torch.optim.Muon) -> None:
        """Step Muon, whose momentum is sharded. torch's own step would orthogonalise each shard by itself."""
        parameters = {id(share): self.parameters[name] for name, share in self.shares.items()}
        for group in muon.param_groups:
            options = {name: group[name] for name in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
            for share in group["params"]:
                parameter, state, gradient = parameters[id(share)], muon.state[share], share.grad
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(share)
                momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
                direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                update = torch.zeros(parameter.shape, device=self.device, requires_grad=True)
                update.grad = like(parameter, direction.to(self.device)).full_tensor()
                plain = torch.optim.Muon(
                    [update], lr=group["lr"], weight_decay=0.0, momentum=0.0, nesterov=False, **options
                )
                plain.step()  # type: ignore[no-untyped-call]
                share.mul_(1 - group["lr"] * group["weight_decay"])
                share.add_(update.detach()[shard_of(as_dtensor(parameter))].to(share.device))

    def move_averages(self) -> None:
        """Move the averages toward this rank's shards, with the decay of the last step."""
        move_averages([*self.averages.values()], [*self.shares.values()], self.training, self.step_count)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving averages into this rank's shards inside this context. Changes no state.

        Parameters must not be gathered when it begins or ends. Raises `UnsupportedError` without `ema_decay`.
        """
        if not self.averages:
            raise UnsupportedError("outputs of the moving average are wanted, but ema_decay is not set")
        exchange(self.shares.values(), self.averages.values())
        try:
            yield
        finally:
            exchange(self.shares.values(), self.averages.values())

    def clear(self) -> None:
        """Drop the gradients."""
        for name, parameter in self.parameters.items():
            parameter.grad = self.shares[name].grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Optimizer state as `<state>.<parameter name>`, and averages as `average.<parameter name>`, sharded like their
        parameters.

        State is allocated if no step was taken yet.
        """
        tensors: dict[str, Tensor] = {
            f"average.{name}": like(self.parameters[name], average) for name, average in self.averages.items()
        }
        for name, parameter in self.parameters.items():
            for state, share in state_tensors(self.torch_optimizer, self.shares[name]).items():
                tensors[f"{state}.{name}"] = like(parameter, share)
        return tensors

    def restored(self, step_count: int) -> None:
        """Continue at `step_count`. Call after the tensors of `tensors()` were overwritten in place."""
        self.step_count = step_count
        set_step_count(self.torch_optimizer, step_count)
        self.clear()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the trained parameters, by name."""
        return {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def read(self, name: str) -> ParameterState:
        """Master weight and Adam moments of one parameter, as whole tensors on every rank.

        The master weight is the parameter itself, float32 for every compute dtype. Collective, on `device` even if the
        shards are in host memory.
        """
        parameter = self.parameters[name]
        master, first, second = (like(parameter, shard.to(self.device)).full_tensor() for shard in self._shards(name))
        return ParameterState(master=master, exp_avg=first, exp_avg_sq=second)

    @torch.no_grad()
    def load(self, state: PortableState) -> None:
        """Overwrite this rank's shards by those of a portable state, read one whole parameter at a time."""
        for name, parameter in self.parameters.items():
            loaded, local_slice = state.read(name), shard_of(as_dtensor(parameter))
            for shard, full in zip(self._shards(name), (loaded.master, loaded.exp_avg, loaded.exp_avg_sq), strict=True):
                shard.copy_(full[local_slice])
        self.restored(state.step_count)

    def _shards(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's shards of master weight, first and second moment."""
        share = self.shares[name]
        return share.detach(), *moments(self.torch_optimizer, share)

    def gradients(self) -> list[Tensor]:
        """This rank's shards of the existing gradients."""
        return [local(parameter.grad) for parameter in self.parameters.values() if parameter.grad is not None]

    def states(self) -> list[Tensor]:
        """This rank's tensors of optimizer state: averages, step counts, and moments once allocated."""
        states = self.torch_optimizer.state.values()
        made = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return [*made, *self.averages.values()]

    def _gradient(self, name: str) -> Tensor:
        """Set the shard's `.grad` to this rank's gradient, and return it. Zeros if there is no gradient."""
        share, grad = self.shares[name], self.parameters[name].grad
        share.grad = gradient = torch.zeros_like(share) if grad is None else local(grad)
        return gradient

    def _norm(self, gradients: list[Tensor]) -> float:
        norms = torch._foreach_norm(gradients, 2)
        # Meshes differ, so each shard's square is divided by its number of holders before the sum over all ranks.
        squares = torch.stack(norms).double().square() / self.num_holders
        # float32, because not every communication backend supports float64.
        total = squares.sum().to(self.device, torch.float32)
        dist.all_reduce(total)
        return math.sqrt(float(total))


def as_dtensor(tensor: Tensor) -> DTensor:
    """The tensor of a sharded model, typed as the DTensor that it is."""
    return cast("DTensor", tensor)


def num_holders(tensor: Tensor) -> int:
    """Number of ranks of the role that hold the same shard of a DTensor."""
    sharded = as_dtensor(tensor)
    sizes = zip(sharded.placements, sharded.device_mesh.shape, strict=True)
    return dist.get_world_size() // math.prod(size for placement, size in sizes if not placement.is_replicate())


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, detached, on the same memory."""
    return as_dtensor(tensor)._local_tensor.detach()


def like(parameter: Tensor, share: Tensor) -> DTensor:
    """A DTensor whose local shard is `share`, with the mesh and placements of `parameter`."""
    sharded = as_dtensor(parameter)
    return DTensor.from_local(
        share, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def shard_of(tensor: DTensor) -> tuple[slice, ...]:
    """The index range of this rank's shard in each dimension of the full tensor.

    Tensor or expert parallelism splits first, into equal parts. FSDP then splits the remaining range; its last shards
    may be shorter or empty.
    """
    mesh = tensor.device_mesh
    placements = dict(zip(mesh.mesh_dim_names or (), tensor.placements, strict=True))
    spans = [range(length) for length in tensor.shape]
    for name in ("tensor", "expert", "shard"):
        placement = placements.get(name)
        if placement is not None and not placement.is_replicate():
            dim, size = placement.dim, mesh[name].size()  # type: ignore[attr-defined]
            piece = math.ceil(len(spans[dim]) / size)
            start = piece * mesh[name].get_local_rank()
            spans[dim] = spans[dim][start : start + piece]
    return tuple(slice(span.start, span.stop) for span in spans)
