"""Context parallelism: long sequences split over several ranks.

Everything except attention works on each token separately, so each rank computes a part of the tokens. Attention needs
whole sequences. It either exchanges heads for tokens (`Ulysses`, here) or passes keys and values around
(`ring_attention`). Both are exact for packed sequences. Tokens are padded by one extra sequence whose outputs are
ignored.

Ulysses (DeepSpeed, 2309.14509):

    rank 0  tokens 0..3, all heads  \\  attention  /  heads 0..1, all tokens  \\            /  tokens 0..3, all heads
    rank 1  tokens 4..7, all heads  /  exchange   \\  heads 2..3, all tokens  /  exchange  \\  tokens 4..7, all heads

Shapes: T tokens (padded), P ranks, H heads, D head size, N rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from roll_core.errors import PlacementError
from roll_modeling.attention import attend_flat
from roll_modeling.collectives import summed

if TYPE_CHECKING:
    from torch import Tensor

    from roll_modeling.attention import AttentionOptions


class ContextParallel(ABC):
    """One rank of a group that shares the tokens of a microbatch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    @property
    def multiple(self) -> int:
        """Padding multiple of the number of tokens."""
        return self.size

    def part(self, num_tokens: int) -> Tensor:
        """Indices of this rank's tokens, `[T / P]`. The last indices may lie beyond `num_tokens` (padding)."""
        length = -(-num_tokens // self.size)
        return torch.arange(self.rank * length, (self.rank + 1) * length)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: AttentionOptions) -> Tensor:
        """Attention of this rank's tokens: `[1, H, T / P, D]` queries to `[1, T / P, H, D]` outputs.

        Keys and values have as many tokens as the queries, and possibly fewer heads.
        """

    def largest(self, tensor: Tensor) -> float:
        """Maximum of `tensor` over all ranks. Collective."""
        maximum = tensor.max().float()
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.group)
        return float(maximum)

    def whole(self, tensor: Tensor) -> Tensor:
        """Combine the ranks' outputs into one tensor for all tokens, on every rank. Collective.

        `tensor` must be 0 at the other ranks' tokens. Every rank then computes the same loss. Parameter gradients are
        this rank's part. Sum them over the ranks like those of data-parallel ranks.
        """
        return summed(tensor, self.group)


class Ulysses(ContextParallel):
    """Context parallelism in which each rank computes attention for some heads of all tokens."""

    def check_heads(self, heads: int, key_heads: int, key: str) -> None:
        """Raise `PlacementError`, naming the config `key`, if the heads cannot be split over the ranks."""
        if heads % self.size:
            raise PlacementError(f"{key} {self.size} does not divide the {heads} attention heads that a rank has")
        if key_heads % self.size and self.size % key_heads:
            raise PlacementError(
                f"{key} {self.size} is neither a divisor nor a multiple of the {key_heads} key and value heads that a"
                " rank has"
            )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: AttentionOptions) -> Tensor:
        """Compute attention between two all-to-all exchanges."""
        if how.sinks_H is not None:
            how = replace(how, sinks_H=how.sinks_H.chunk(self.size)[self.rank])
        attended = attend_flat(self._heads(query), self._heads(key), self._heads(value), how)
        return self._exchange(attended)

    def _heads(self, tensor: Tensor) -> Tensor:
        """`[1, H, T / P, D]` to `[1, H / P, T, D]`. Key heads are repeated if there are fewer heads than ranks."""
        if tensor.shape[1] < self.size:
            tensor = tensor.repeat_interleave(self.size // tensor.shape[1], dim=1)
        return self._exchange(tensor)

    def _exchange(self, tensor: Tensor) -> Tensor:
        result: Tensor = _Exchange.apply(tensor, self.group, 1, 2)  # type: ignore[no-untyped-call]
        return result


class _Exchange(torch.autograd.Function):
    """All-to-all: split dimension `cut` into a piece per rank, and concatenate received pieces along `join`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return _exchanged(tensor, group, cut, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.group, ctx.join, ctx.cut), None, None, None


def _exchanged(tensor: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
    sent = torch.stack(tensor.chunk(dist.get_world_size(group), dim=cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=join)
