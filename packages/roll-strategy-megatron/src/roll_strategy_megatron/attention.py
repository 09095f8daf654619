"""Core attention over packed sequences by torch's kernels, with context parallelism.

Keys and values are all-gathered over the context-parallel ranks (as in Llama 3's training, arXiv:2407.21783, 3.3.2),
and each rank attends with its own queries. Gradients of keys and values are summed in the backward pass.

Shapes: L tokens on this rank, P over all context-parallel ranks, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import inspect
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from roll_modeling.attention import FlatLayout, flat_attention

try:
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roll_strategy_megatron.packing import Packed


KERNEL = varlen_attn is not None and {"window_size", "enable_gqa"} <= {*inspect.signature(varlen_attn).parameters}
"""True if torch's `varlen_attn` supports sliding windows and grouped-query attention."""
LARGEST_HEAD = 192
"""Largest head size with a backward pass on all supported devices."""
AMPERE = (8, 0)


class PackedAttention(nn.Module):
    """Replacement of Megatron's local core attention, which supports neither packed sequences nor context
    parallelism."""

    def __init__(
        self, config: Any, layer_number: int, *, scale: float | None = None, pg_collection: Any, **_unused: object
    ) -> None:
        """`scale` multiplies the attention scores. Default: 1 / sqrt(head size)."""
        super().__init__()
        self.scale = config.kv_channels**-0.5 if scale is None else scale
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
        """Attention of `[L, H, D]` queries, `[L, K, D]` keys and values.

        Returns `[L, H · D]`, with D the head size of the values.

        Values may be smaller than keys. They are then padded with zeros, and the corresponding part of the output is
        dropped.
        """
        size = value.shape[-1]
        if size < key.shape[-1]:
            value = F.pad(value, (0, key.shape[-1] - size))
        lengths = packed_seq_params.padded_lengths
        if self.cp_group.size() > 1:
            found = self._shared(query, key, value, lengths)
        elif kernel_takes(query):
            bounds = packed_seq_params.cu_seqlens_q
            found = self._by_kernel(query, key, value, bounds, bounds, max(lengths), max(lengths))
        else:
            found = flat_attention(
                self,
                _heads_first(query),
                _heads_first(key),
                _heads_first(value),
                None,
                scaling=self.scale,
                roll_layout=FlatLayout(lengths),
                sliding_window=self.window,
            )[0][0]
        return found[..., :size].flatten(1)

    def _shared(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        size, rank = self.cp_group.size(), self.cp_group.rank()
        shares = [length // size for length in lengths]
        both = gather_from_sequence_parallel_region(
            torch.stack([key, value], dim=1).contiguous(), tensor_parallel_output_grad=True, group=self.cp_group
        )
        # Per rank, then per sequence: its front piece and its back piece.
        by_rank = [torch.split(each, shares) for each in torch.split(both, sum(shares))]
        pieces = [share // 2 for share in shares for _ in range(2)]
        seen: list[Tensor] = []  # keys and values that each piece of queries attends to
        for at, share in enumerate(shares):
            halves = [each[at].chunk(2) for each in by_rank]
            whole = torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)])
            piece = share // 2
            for number in (rank, 2 * size - 1 - rank):
                end = (number + 1) * piece
                first = max(0, end - piece - self.window + 1) if self.window else 0
                seen.append(whole[first:end])
        if kernel_takes(query):
            keys = [len(each) for each in seen]
            key, value = torch.cat(seen).unbind(1)
            query_bounds, key_bounds = (_bounds(each, query.device) for each in (pieces, keys))
            return self._by_kernel(query, key, value, query_bounds, key_bounds, max(pieces), max(keys))
        queries = torch.split(query, pieces)
        return torch.cat([self._attend(part, *each.unbind(1)) for part, each in zip(queries, seen, strict=True)])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of queries that are the last tokens of the keys' sequence."""
        # Where fused kernels support this bias, no mask is allocated; for long sequences it would exceed all other
        # memory.
        seen: Tensor = causal_lower_right(query.shape[0], key.shape[0])
        if self.window:
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

    def _by_kernel(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_bounds: Tensor,
        key_bounds: Tensor,
        longest_query: int,
        longest_key: int,
    ) -> Tensor:
        """Attention of all sequences, or all pieces of them, by one kernel call."""
        found: Tensor = varlen_attn(
            query,
            key,
            value,
            query_bounds,
            key_bounds,
            longest_query,
            longest_key,
            scale=self.scale,
            window_size=(self.window - 1 if self.window else -1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return found


def kernel_takes(query: Tensor) -> bool:
    """True if torch's flash-attn 2 kernels support this `[L, H, D]` tensor, so that one call handles all sequences."""
    return (
        KERNEL
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= LARGEST_HEAD
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= AMPERE
    )


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _heads_first(each: Tensor) -> Tensor:
    """Transpose `[L, H, D]` to `[1, H, L, D]`."""
    return each.transpose(0, 1)[None]
