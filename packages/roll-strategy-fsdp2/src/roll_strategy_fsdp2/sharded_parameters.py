"""Parameters sharded by tensor or expert parallelism before FSDP, and modules that compute on the local shards."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A DTensor parameter: its owner module, its name, and the placement of its gradient."""

    owner: nn.Module
    name: str
    grad: Placement


def generic(name: str) -> str:
    """Replace each number in a module path by `*`, as in the keys of transformers' parallel plans."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def distribute(owner: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace a parameter by a DTensor with `placement` over `mesh`, without communication.

    Every rank must have the full tensor, or the tensor must be on the meta device.
    """
    parameter = owner._parameters[name]
    if parameter is None:
        return
    cut = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    if not cut.is_meta:
        # Copy, because a view of the full tensor would keep all of its memory allocated.
        cut = DTensor.from_local(
            cut.to_local().clone(memory_format=torch.contiguous_format), mesh, [placement], run_check=False
        )
    owner._parameters[name] = nn.Parameter(cut, requires_grad=parameter.requires_grad)


def local_of(sharded: ShardedParameter) -> Tensor:
    """The local tensor of a DTensor parameter. Autograd propagates its gradient to the DTensor."""
    parameter = sharded.owner._parameters[sharded.name]
    if not isinstance(parameter, DTensor):
        raise TypeError(f"{sharded.name} is no DTensor any more")
    return parameter.to_local(grad_placements=[sharded.grad])


@contextmanager
def local_parameters(parameters: list[ShardedParameter]) -> Iterator[None]:
    """Replace DTensor parameters by their local tensors inside the context.

    The parameters are also restored if an exception ends the body, as when activation checkpointing stops a
    recomputation early.
    """
    originals = [(sharded, sharded.owner._parameters[sharded.name]) for sharded in parameters]
    for sharded in parameters:
        sharded.owner._parameters[sharded.name] = local_of(sharded)  # type: ignore[assignment]
    try:
        yield
    finally:
        for sharded, parameter in originals:
            sharded.owner._parameters[sharded.name] = parameter


@contextmanager
def without_parameters(parameters: list[ShardedParameter]) -> Iterator[None]:
    """Set parameters to None inside the context."""
    originals = [(sharded, sharded.owner._parameters[sharded.name]) for sharded in parameters]
    for sharded in parameters:
        sharded.owner._parameters[sharded.name] = None
    try:
        yield
    finally:
        for sharded, parameter in originals:
            sharded.owner._parameters[sharded.name] = parameter
