"""Transforms between tensors of a Hugging Face model and Megatron's fused, sharded tensors.

    [q] [k] [v]  --join-->  full tensor whose dimension `tp_dim` is evenly divisible  --cut-->  a rank's shard

Shapes: G groups of query heads with a key and a value head each, D head size, I feed-forward size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model that transforms need."""

    num_heads: int
    num_groups: int
    head_dim: int
    vocab: int
    padded_vocab: int
    """Vocabulary size padded to a multiple of the tensor-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class Transform(ABC):
    """One way to fuse and shard tensors; rules refer to it."""

    tp_dim: int | None = None
    """Dimension of the joined tensor that tensor parallelism shards; None for replicated tensors."""

    @abstractmethod
    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Join Hugging Face's tensors into one."""

    @abstractmethod
    def split(self, tensor: Tensor, num_parts: int, sizes: Sizes) -> list[Tensor]:
        """Split a joined tensor into Hugging Face's: the inverse of `join`."""

    def cut(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """A tensor-parallel rank's shard of the joined tensor."""
        return tensor if self.tp_dim is None else tensor.chunk(size, self.tp_dim)[rank]

    def whole_shape(self, share: Tensor, size: int, sizes: Sizes) -> tuple[int, ...]:
        """Shape of a shard as `cut` returns it; Megatron's parameter may have fewer dimensions."""
        return tuple(share.shape)


@dataclass(frozen=True, kw_only=True)
class Copy(Transform):
    """The tensor itself; `tp_dim` 0 for layers sharded by outputs, 1 for layers sharded by inputs."""

    transposed: bool = False
    """Transpose Hugging Face's matrix of inputs × outputs."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Return the only part."""
        return parts[0].T if self.transposed else parts[0]

    def split(self, tensor: Tensor, num_parts: int, sizes: Sizes) -> list[Tensor]:
        """Return the tensor as the only part."""
        return [tensor.T if self.transposed else tensor]


@dataclass(frozen=True, kw_only=True)
class Vocabulary(Transform):
    """Vocabulary rows, padded to a multiple of the tensor-parallel ranks."""

    tp_dim: int | None = 0

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Append rows of zeros."""
        missing = sizes.padded_vocab - sizes.vocab
        return torch.cat([parts[0], parts[0].new_zeros(missing, parts[0].shape[1])]) if missing else parts[0]

    def split(self, tensor: Tensor, num_parts: int, sizes: Sizes) -> list[Tensor]:
        """Drop the padding."""
        return [tensor[: sizes.vocab]]


@dataclass(frozen=True, kw_only=True)
class FuseQKV(Transform):
    """`[q] [k] [v]`, three tensors or one, to `[G, (heads per group + 2) · D, ...]`: each group's queries, key, value.

    Also for biases.
    """

    tp_dim: int | None = 0

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Join query, key and value, in this order."""
        if len(parts) == 1:
            rows = [heads * sizes.head_dim for heads in (sizes.num_heads, sizes.num_groups, sizes.num_groups)]
            parts = torch.split(parts[0], rows)
        return torch.cat([part.reshape(sizes.num_groups, -1, *part.shape[1:]) for part in parts], dim=1)

    def split(self, tensor: Tensor, num_parts: int, sizes: Sizes) -> list[Tensor]:
        """Split into query, key and value, in this order, or return all as one tensor."""
        queries = sizes.num_heads // sizes.num_groups * sizes.head_dim
        parts = [part.flatten(0, 1) for part in torch.split(tensor, [queries, sizes.head_dim, sizes.head_dim], dim=1)]
        return parts if num_parts == 3 else [torch.cat(parts)]

    def whole_shape(self, share: Tensor, size: int, sizes: Sizes) -> tuple[int, ...]:
        """Shape of a shard with a dimension for the groups."""
        return (sizes.num_groups // size, -1, *share.shape[1:])


@dataclass(frozen=True, kw_only=True)
class ShardedParts(Transform):
    """Rows of several projections in one tensor; each rank has a shard of each projection, in the same order.

    Adapters of layers that transformers has fused (Phi-3's `qkv_proj`) have factors B like this.
    """

    tp_dim: int | None = 0
    rows: tuple[int, ...]
    """Rows of each projection, over all ranks."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Return the only part."""
        return parts[0]

    def cut(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """A rank's rows of each projection."""
        return torch.cat([part.chunk(size)[rank] for part in torch.split(tensor, list(self.rows))])

    def whole_shape(self, share: Tensor, size: int, sizes: Sizes) -> tuple[int, ...]:
        """Shape of a shard with a dimension for the ranks."""
        return (1, *share.shape)

    def split(self, tensor: Tensor, num_parts: int, sizes: Sizes) -> list[Tensor]:
        """Put each projection's rows of all ranks together."""
        by_projection = torch.split(tensor, [rows // len(tensor) for rows in self.rows], dim=1)
        return [torch.cat([part.flatten(0, 1) for part in by_projection])]


@dataclass(frozen=True, kw_only=True)
class FuseGateUp(Transform):
    """Gate and up projections, two tensors or one, to `[2, I, ...]`."""

    tp_dim: int | None = 1
    transposed: bool = False
    """Transpose Hugging Face's matrix of inputs × outputs."""
    interleaved: bool = False
    """The outputs of gate and up alternate in Hugging Face's tensor."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Join gate and up, in this order."""
        both = torch.cat(list(parts))
        if self.transposed:
            both = both.T
        if self.interleaved:
            return both.reshape(len(both) // 2, 2, *both.shape[1:]).transpose(0, 1)
        return both.reshape(2, len(both) // 2, *both.shape[1:])  # an expert without tokens has parts without columns

    def split(self, tensor: Tensor, num_parts: int, sizes: Sizes) -> list[Tensor]:
        """Split into gate and up, in this order, or return both as one tensor."""
        both = (tensor.transpose(0, 1) if self.interleaved else tensor).flatten(0, 1)
        return list((both.T if self.transposed else both).chunk(num_parts))

    def whole_shape(self, share: Tensor, size: int, sizes: Sizes) -> tuple[int, ...]:
        """Shape of a shard with a dimension for gate and up."""
        return (2, -1, *share.shape[1:])
