"""Long sequences over several ranks: everything but attention works on tokens one by one, so a rank has some of them.

Attention sees whole sequences, by exchanging heads for tokens around it (`Ulysses`, here) or by passing keys and values
round (`ring_attention`); either is exact for packed sequences as they stand. Tokens are filled up by a sequence that
nobody reads.

Ulysses (DeepSpeed, 2309.14509):

    rank 0  tokens 0..3, all heads  \\  attention  /  heads 0..1, all tokens  \\            /  tokens 0..3, all heads
    rank 1  tokens 4..7, all heads  /  exchange   \\  heads 2..3, all tokens  /  exchange  \\  tokens 4..7, all heads

Shapes: T tokens (after filling up), P ranks, H heads, D head size, N rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from roll_core.errors import PlacementError
from roll_modeling.attention import attend_flat
from roll_modeling.collectives import summed

if TYPE_CHECKING:
    from torch import Tensor

    from roll_modeling.attention import How


class ContextParallel(ABC):
    """One rank's place among those that share the tokens of a microbatch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    @property
    def multiple(self) -> int:
        """Tokens are filled up to a multiple of it."""
        return self.size

    def part(self, num_tokens: int) -> Tensor:
        """Indices of the tokens of this rank, `[T / P]`; the last ones may lie behind the end."""
        length = -(-num_tokens // self.size)
        return torch.arange(self.rank * length, (self.rank + 1) * length)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """`[1, H, T / P, D]` queries and as many keys and values, of some heads, to `[1, T / P, H, D]`."""

    def largest(self, tensor: Tensor) -> float:
        """Of all numbers of all ranks."""
        found = tensor.max().float()
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return float(found)

    def whole(self, tensor: Tensor) -> Tensor:
        """Of all tokens, on every rank, from what each rank has of its own with 0 elsewhere. Every rank goes on to the
        same loss; gradients of parameters are this rank's part, to be added up like those of data-parallel ranks."""
        return summed(tensor, self.group)


class Ulysses(ContextParallel):
    """Ranks see all tokens of some heads."""

    def check_heads(self, heads: int, key_heads: int, key: str) -> None:
        """Raises `PlacementError`, which names the configuration's `key`, where heads cannot be dealt out."""
        if heads % self.size:
            raise PlacementError(f"{key} {self.size} does not divide the {heads} attention heads that a rank has")
        if key_heads % self.size and self.size % key_heads:
            raise PlacementError(
                f"{key} {self.size} is neither a divisor nor a multiple of the {key_heads} key and value heads that a"
                " rank has"
            )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Between two exchanges."""
        found = attend_flat(self._heads(query), self._heads(key), self._heads(value), how)
        return self._exchange(found)

    def _heads(self, tensor: Tensor) -> Tensor:
        """`[1, H, T / P, D]` to `[1, H / P, T, D]`. Where there are fewer (key) heads than ranks each is repeated."""
        if tensor.shape[1] < self.size:
            tensor = tensor.repeat_interleave(self.size // tensor.shape[1], dim=1)
        return self._exchange(tensor)

    def _exchange(self, tensor: Tensor) -> Tensor:
        found: Tensor = _Exchange.apply(tensor, self.group, 1, 2)  # type: ignore[no-untyped-call]
        return found


class _Exchange(torch.autograd.Function):
    """Cuts dimension `cut` into a piece for each rank, and joins what comes along dimension `join`."""

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
