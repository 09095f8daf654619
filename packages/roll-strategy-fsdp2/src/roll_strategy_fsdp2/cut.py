"""Parameters that are cut over a mesh before FSDP cuts them further, and modules that compute on the plain pieces."""

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
class Use:
    """A parameter: where it stands, and whether its gradient is partial."""

    owner: nn.Module
    name: str
    grad: Placement


def generic(name: str) -> str:
    """As transformers' plans name a module: with a star for every number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def distribute(owner: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Every rank has the whole tensor, or none has any number yet: nothing travels."""
    parameter = owner._parameters[name]
    if parameter is None:
        return
    cut = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    if not cut.is_meta:
        # A copy: the whole tensor is not kept alive by a piece of it.
        cut = DTensor.from_local(
            cut.to_local().clone(memory_format=torch.contiguous_format), mesh, [placement], run_check=False
        )
    owner._parameters[name] = nn.Parameter(cut, requires_grad=parameter.requires_grad)


def local_of(use: Use) -> Tensor:
    """The plain tensor, whose gradient finds its way into the DTensor."""
    parameter = use.owner._parameters[use.name]
    if not isinstance(parameter, DTensor):
        raise TypeError(f"{use.name} is no DTensor any more")
    return parameter.to_local(grad_placements=[use.grad])


@contextmanager
def local_parameters(uses: list[Use]) -> Iterator[None]:
    """For the time being modules have the plain tensors. Also ends when a recomputation in the backward pass stops in
    the middle, by an exception."""
    kept = [(each, each.owner._parameters[each.name]) for each in uses]
    for each in uses:
        each.owner._parameters[each.name] = local_of(each)  # type: ignore[assignment]
    try:
        yield
    finally:
        for each, parameter in kept:
            each.owner._parameters[each.name] = parameter


@contextmanager
def without(uses: list[Use]) -> Iterator[None]:
    """For the time being modules do not have these at all."""
    kept = [(each, each.owner._parameters[each.name]) for each in uses]
    for each in uses:
        each.owner._parameters[each.name] = None
    try:
        yield
    finally:
        for each, parameter in kept:
            each.owner._parameters[each.name] = parameter
