"""How tensors of a Hugging Face model become one of Megatron's, and back.

    [q] [k] [v]  --join-->  whole, in a shape whose dimension `tp_dim` is cut evenly  --cut-->  a rank's share

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
    """Of a model, as far as transforms need them."""

    num_heads: int
    num_groups: int
    head_dim: int
    vocab: int
    padded_vocab: int
    """A multiple of the tensor parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class Transform(ABC):
    """One kind of joining; a rule of an architecture names it."""

    tp_dim: int | None = None
    """Dimension of the whole that tensor parallel ranks cut; None where each holds all of it."""

    @abstractmethod
    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Hugging Face's tensors as one."""

    @abstractmethod
    def split(self, whole: Tensor, num_parts: int, sizes: Sizes) -> list[Tensor]:
        """Undoes `join`."""

    def cut(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """A tensor parallel rank's share of the whole."""
        return whole if self.tp_dim is None else whole.chunk(size, self.tp_dim)[rank]

    def whole_shape(self, share: Tensor, size: int, sizes: Sizes) -> tuple[int, ...]:
        """Of a share, as `cut` leaves it: Megatron may hold it in fewer dimensions."""
        return tuple(share.shape)


@dataclass(frozen=True, kw_only=True)
class Copy(Transform):
    """The same tensor; `tp_dim` 0 for layers that are cut by outputs, 1 by inputs."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """There is one."""
        return parts[0]

    def split(self, whole: Tensor, num_parts: int, sizes: Sizes) -> list[Tensor]:
        """There is one."""
        return [whole]


@dataclass(frozen=True, kw_only=True)
class Vocabulary(Transform):
    """Rows of tokens, padded so that they can be cut."""

    tp_dim: int | None = 0

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Padding is 0."""
        missing = sizes.padded_vocab - sizes.vocab
        return torch.cat([parts[0], parts[0].new_zeros(missing, parts[0].shape[1])]) if missing else parts[0]

    def split(self, whole: Tensor, num_parts: int, sizes: Sizes) -> list[Tensor]:
        """Without the padding."""
        return [whole[: sizes.vocab]]


@dataclass(frozen=True, kw_only=True)
class FuseQKV(Transform):
    """`[q] [k] [v]` to `[G, (heads per group + 2) · D, ...]`: each group's queries, its key, its value. Biases too."""

    tp_dim: int | None = 0

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Query, key and value, in this order."""
        return torch.cat([each.reshape(sizes.num_groups, -1, *each.shape[1:]) for each in parts], dim=1)

    def split(self, whole: Tensor, num_parts: int, sizes: Sizes) -> list[Tensor]:
        """Query, key and value, in this order."""
        queries = sizes.num_heads // sizes.num_groups * sizes.head_dim
        return [each.flatten(0, 1) for each in torch.split(whole, [queries, sizes.head_dim, sizes.head_dim], dim=1)]

    def whole_shape(self, share: Tensor, size: int, sizes: Sizes) -> tuple[int, ...]:
        """By groups."""
        return (sizes.num_groups // size, -1, *share.shape[1:])


@dataclass(frozen=True, kw_only=True)
class FuseGateUp(Transform):
    """Gate and up, two tensors or one, to `[2, I, ...]`."""

    tp_dim: int | None = 1

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Gate and up, in this order."""
        both = torch.cat(list(parts))
        return both.reshape(2, len(both) // 2, *both.shape[1:])  # parts may have no columns: an expert without tokens

    def split(self, whole: Tensor, num_parts: int, sizes: Sizes) -> list[Tensor]:
        """Gate and up, in this order, or both in one."""
        return list(whole.flatten(0, 1).chunk(num_parts))

    def whole_shape(self, share: Tensor, size: int, sizes: Sizes) -> tuple[int, ...]:
        """A share is fused as well."""
        return (2, -1, *share.shape[1:])
