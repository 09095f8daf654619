"""Core attention over packed sequences, shared among context parallel ranks, by torch's own kernels.

Keys and values are gathered over the context parallel ranks (as in Llama 3's training, arXiv:2407.21783, 3.3.2), and
each rank attends with its own queries; gradients of keys and values are summed on the way back.

Shapes: L tokens on this rank, P over all context parallel ranks, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from roll_core.modeling.attention import FlatLayout, flat_attention

if TYPE_CHECKING:
    from torch import Tensor

    from roll_strategy_megatron.packing import Packed


class PackedAttention(nn.Module):
    """Stands where Megatron puts its core attention, which takes neither packed sequences nor shared ones."""

    def __init__(
        self, config: Any, layer_number: int, *, softmax_scale: float | None, pg_collection: Any, **_unused: object
    ) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.window: int = config.window_size[0] + 1 if config.window_size else 0
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Packed,
        **_unused: object,
    ) -> Tensor:
        """`[L, H, D]` queries and `[L, K, D]` keys and values to `[L, H · D]`. Values may be smaller than keys: they
        are filled up with zeros, and what comes of these is cut off."""
        size = value.shape[-1]
        if size < key.shape[-1]:
            value = F.pad(value, (0, key.shape[-1] - size))
        lengths = packed_seq_params.padded_lengths
        if self.cp_group.size() == 1:
            found, _ = flat_attention(
                self,
                _heads_first(query),
                _heads_first(key),
                _heads_first(value),
                None,
                scaling=self.scale,
                roll_layout=FlatLayout(lengths),
                sliding_window=self.window,
            )
            return found[0][..., :size].flatten(1)
        return self._shared(query, key, value, lengths)[..., :size].flatten(1)

    def _shared(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        size, rank = self.cp_group.size(), self.cp_group.rank()
        shares = [length // size for length in lengths]
        both = gather_from_sequence_parallel_region(
            torch.stack([key, value], dim=1).contiguous(), tensor_parallel_output_grad=True, group=self.cp_group
        )
        # Of each rank, then of each sequence: its piece from the front and its piece from the back.
        by_rank = [torch.split(each, shares) for each in torch.split(both, sum(shares))]
        outputs = []
        for at, mine in enumerate(torch.split(query, shares)):
            halves = [each[at].chunk(2) for each in by_rank]
            whole = torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)])
            piece = shares[at] // 2
            for part, number in zip(mine.chunk(2), (rank, 2 * size - 1 - rank), strict=True):
                end = (number + 1) * piece
                outputs.append(self._attend(part, whole[:end, 0], whole[:end, 1]))
        return torch.cat(outputs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries are the last of the sequence so far."""
        # On a device whose kernels know this shape no mask is made: a long sequence's would be larger than all else.
        seen: Tensor = causal_lower_right(query.shape[0], key.shape[0])
        if self.window:
            reached = query.shape[0] + self.window - 1
            key, value = key[-reached:], value[-reached:]
            before = key.shape[0] - query.shape[0]
            whole = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool, device=query.device)
            seen = whole.tril(before).triu(before - self.window + 1)
        found = F.scaled_dot_product_attention(
            _heads_first(query),
            _heads_first(key),
            _heads_first(value),
            attn_mask=seen,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return found[0].transpose(0, 1)


def _heads_first(each: Tensor) -> Tensor:
    """`[L, H, D]` to `[1, H, L, D]`."""
    return each.transpose(0, 1)[None]
