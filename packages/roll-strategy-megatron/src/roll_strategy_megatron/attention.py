"""Core attention over packed sequences, with context parallelism.

Keys and values are all-gathered over the context-parallel ranks (as in Llama 3's training, arXiv:2407.21783, 3.3.2),
and each rank attends with its own queries. Gradients of keys and values are summed in the backward pass.

Shapes: L tokens on this rank, P over all context-parallel ranks, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from roll_modeling.attention import AttentionOptions, attend_scores, flat_attention
from roll_modeling.varlen_attention import Sequences, varlen_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from roll_modeling.attention import FlatLayout
    from roll_strategy_megatron.packing import Packed


class PackedAttention(nn.Module):
    """Replacement of Megatron's local core attention, which supports neither packed sequences nor context
    parallelism."""

    def __init__(self, config: Any, layer_number: int, *, scale: float, pg_collection: Any, **_unused: object) -> None:
        """`scale` multiplies the attention scores."""
        super().__init__()
        self.scale = scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int = config.window_size[0] + 1 if windowed else 0
        self.softcap: float = config.attention_softcap
        self.softmax_offset: nn.Parameter | None = None
        """Attention sinks: a logit per head of this rank that only adds to the softmax denominator."""
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
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
        """Attention of `[L, H, D]` queries, `[L, K, D]` keys and values.

        Returns `[L, H · D]`, with D the head size of the values, which may be smaller than keys.
        """
        layout = packed_seq_params.layout
        if self.cp_group.size() > 1:
            return self._shared(query, key, value, layout).flatten(1)
        attended, _ = flat_attention(
            self,
            _heads_first(query),
            _heads_first(key),
            _heads_first(value),
            None,
            scaling=self.scale,
            roll_layout=layout,
            softcap=self.softcap,
            s_aux=self.softmax_offset,
            sliding_window=self.window,
        )
        return attended[0].flatten(1)

    def _shared(self, query: Tensor, key: Tensor, value: Tensor, layout: FlatLayout) -> Tensor:
        """`[L, H, D]`. Values are padded to the keys' size for the exchange."""
        lengths, value_size = layout.lengths, value.shape[-1]
        value = F.pad(value, (0, key.shape[-1] - value_size))
        size, rank = self.cp_group.size(), self.cp_group.rank()
        shares = [length // size for length in lengths]
        both = gather_from_sequence_parallel_region(
            torch.stack([key, value], dim=1).contiguous(), tensor_parallel_output_grad=True, group=self.cp_group
        )
        # Per rank, then per sequence: its front piece and its back piece.
        by_rank = [torch.split(gathered, shares) for gathered in torch.split(both, sum(shares))]
        pieces = [share // 2 for share in shares for _ in range(2)]
        seen: list[Tensor] = []  # keys and values that each piece of queries attends to
        for index, share in enumerate(shares):
            halves = [sequences[index].chunk(2) for sequences in by_rank]
            sequence = torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)])
            piece = share // 2
            for number in (rank, 2 * size - 1 - rank):
                end = (number + 1) * piece
                first = max(0, end - piece - self.window + 1) if self.window else 0
                seen.append(sequence[first:end])
        softcap, sinks_H = self.softcap, self.softmax_offset
        kernel = varlen_kernel(
            query.device, query.dtype, query.shape[-1], softcap=softcap != 0, sinks=sinks_H is not None
        )
        if kernel is not None:
            key, value = torch.cat(seen).unbind(1)
            queries, keys = (
                Sequences.of(counts, query.device)
                for counts in (pieces, [len(keys_of_piece) for keys_of_piece in seen])
            )
            attended = kernel(
                query, key, value, queries, keys, scale=self.scale, window=self.window, softcap=softcap, sinks_H=sinks_H
            )
        else:
            parts = zip(torch.split(query, pieces), seen, strict=True)
            attended = torch.cat([self._attend(layout, part, *keys_values.unbind(1)) for part, keys_values in parts])
        return attended[..., :value_size]

    def _attend(self, layout: FlatLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of queries that are the last tokens of the keys' sequence."""
        if self.softcap or self.softmax_offset is not None:
            how = AttentionOptions(
                layout=layout,
                scale=self.scale,
                window=self.window,
                softcap=self.softcap,
                sinks_H=self.softmax_offset,
            )
            scored = attend_scores(how, _heads_first(query), _heads_first(key), _heads_first(value), self.window)
            return scored[0].transpose(0, 1)
        # Where fused kernels support this bias, no mask is allocated; for long sequences it would exceed all other
        # memory.
        seen: Tensor = causal_lower_right(query.shape[0], key.shape[0])
        if self.window:
            before = key.shape[0] - query.shape[0]
            full_mask = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool, device=query.device)
            seen = full_mask.tril(before).triu(before - self.window + 1)
        attended = F.scaled_dot_product_attention(
            _heads_first(query),
            _heads_first(key),
            _heads_first(value),
            attn_mask=seen,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended[0].transpose(0, 1)


def _heads_first(tensor: Tensor) -> Tensor:
    """Transpose `[L, H, D]` to `[1, H, L, D]`."""
    return tensor.transpose(0, 1)[None]
