"""Collectives with a gradient, for ranks that compute one model together.

A tensor that all ranks of the group hold alike is *whole*; one of which each has a piece is *split*; one that is the
sum of what each has is *partial*.

    copied     whole -> whole     backward: partial gradients are added up
    summed     partial -> whole   backward: as it comes
    gathered   split -> whole     backward: this rank's piece of it
    own_piece  whole -> split     backward: pieces are gathered
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor


def copied(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same tensor, on whose way each rank computes something else with it."""
    found: Tensor = _Copied.apply(tensor, group)  # type: ignore[no-untyped-call]
    return found


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Added up over the ranks; every rank gets the same bits, and goes on with the same computation."""
    found: Tensor = _Summed.apply(tensor, group)  # type: ignore[no-untyped-call]
    return found


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The pieces of the last dimension, of equal size, one after another."""
    found: Tensor = _Gathered.apply(tensor, group)  # type: ignore[no-untyped-call]
    return found


def own_piece(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's piece of the last dimension, which is a multiple of the ranks."""
    found: Tensor = _OwnPiece.apply(tensor, group)  # type: ignore[no-untyped-call]
    return found


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
