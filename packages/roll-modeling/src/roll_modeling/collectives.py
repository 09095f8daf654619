"""Differentiable collectives for ranks that compute one model together.

A *whole* tensor is equal on all ranks of the group. Of a *split* tensor each rank has one piece. A *partial* tensor is
the sum of the ranks' tensors.

    copied     whole -> whole     backward: sums the partial gradients
    summed     partial -> whole   backward: identity
    gathered   split -> whole     backward: takes this rank's piece
    own_piece  whole -> split     backward: gathers the pieces
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor


def copied(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Identity in the forward pass; the backward pass sums the ranks' gradients."""
    result: Tensor = _Copied.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks (all-reduce). Every rank gets identical bits."""
    result: Tensor = _Summed.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' pieces, of equal size, along the last dimension."""
    result: Tensor = _Gathered.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def own_piece(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's piece of the last dimension, whose size must be a multiple of the group's size."""
    result: Tensor = _OwnPiece.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _piece(grads[0], ctx.group), None


class _OwnPiece(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _piece(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.group), None


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    mine = tensor.contiguous()
    pieces = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, mine, group=group)
    return torch.cat(pieces, dim=-1)


def _piece(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)].contiguous()
