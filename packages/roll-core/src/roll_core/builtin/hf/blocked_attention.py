"""Causal attention of short sequences on the host: blocks of queries against only the keys that they can see.

The library's kernel computes the whole square of a short sequence and throws the upper half away. Blocks of 64 queries
leave most of that half out, and query heads that share a key head stand as rows of one matrix.

Shapes: T flat tokens, K key heads, G query heads of each, D head size, B queries of a block, E keys that it can see.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

BLOCK = 64
LONGEST = 512
"""Of the sequences for which the attention weights are kept for the backward pass; longer ones take too much memory."""


def usable(query: Tensor, lengths: Sequence[int]) -> bool:
    """Whether `blocked_attention` can be used, and is faster than the library's kernel."""
    return query.device.type == "cpu" and query.dtype == torch.float32 and max(lengths) <= LONGEST


def blocked_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """`[1, K * G, T, D]` queries and `[1, K, T, D]` keys and values to `[1, T, K * G, D]`."""
    found: Tensor = _Blocked.apply(query, key, value, tuple(lengths), scale)  # type: ignore[no-untyped-call]
    return found


def _blocks(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Start of the sequence, start and end of the block."""
    bounds = itertools.accumulate(lengths, initial=0)
    for first, end in itertools.pairwise(bounds):
        for start in range(first, end, BLOCK):
            yield first, start, min(start + BLOCK, end)


@lru_cache(maxsize=256)
def _future(queries: int, groups: int) -> Tensor:
    """`[B * G, B]`, minus infinity where a key stands behind the query."""
    mask = torch.full((queries, queries), float("-inf")).triu_(1)
    return mask.repeat_interleave(groups, dim=0)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
        _, heads, tokens, size = query.shape
        num_keys = key.shape[1]
        groups = heads // num_keys
        # A token's query heads lie together, so that a block of tokens is a block of rows.
        q_KRD = query.view(num_keys, groups, tokens, size).transpose(1, 2).reshape(num_keys, tokens * groups, size)
        q_KRD = q_KRD * scale
        k_KTD, v_KTD = key[0].contiguous(), value[0].contiguous()
        out_KRD = torch.empty_like(q_KRD)
        keeps = any(ctx.needs_input_grad)
        weights: list[Tensor] = []
        for first, start, end in _blocks(lengths):
            rows = slice(start * groups, end * groups)
            scores_KRE = torch.bmm(q_KRD[:, rows], k_KTD[:, first:end].transpose(1, 2))
            scores_KRE[:, :, start - first :] += _future(end - start, groups)
            weights_KRE = torch.softmax(scores_KRE, dim=-1)
            out_KRD[:, rows] = torch.bmm(weights_KRE, v_KTD[:, first:end])
            if keeps:
                weights.append(weights_KRE)
        ctx.save_for_backward(q_KRD, k_KTD, v_KTD, *weights)
        ctx.lengths, ctx.scale = lengths, scale
        by_token = out_KRD.view(num_keys, tokens, groups, size).transpose(0, 1)
        return by_token.reshape(1, tokens, heads, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_KRD, k_KTD, v_KTD, *weights = ctx.saved_tensors
        num_keys, tokens, size = k_KTD.shape
        groups = q_KRD.shape[1] // tokens
        d_out_KRD = grads[0].view(tokens, num_keys, groups, size).transpose(0, 1).reshape(q_KRD.shape)
        dq_KRD = torch.empty_like(q_KRD)
        dk_KTD, dv_KTD = torch.zeros_like(k_KTD), torch.zeros_like(v_KTD)
        for (first, start, end), weights_KRE in zip(_blocks(ctx.lengths), weights, strict=True):
            rows, keys = slice(start * groups, end * groups), slice(first, end)
            d_KRD = d_out_KRD[:, rows]
            dv_KTD[:, keys].baddbmm_(weights_KRE.transpose(1, 2), d_KRD)
            d_weights_KRE = torch.bmm(d_KRD, v_KTD[:, keys].transpose(1, 2))
            d_scores_KRE = torch._softmax_backward_data(d_weights_KRE, weights_KRE, -1, torch.float32)
            dq_KRD[:, rows] = torch.bmm(d_scores_KRE, k_KTD[:, keys])
            dk_KTD[:, keys].baddbmm_(d_scores_KRE.transpose(1, 2), q_KRD[:, rows])
        dq = dq_KRD.mul_(ctx.scale).view(num_keys, tokens, groups, size).transpose(1, 2)
        return dq.reshape(1, num_keys * groups, tokens, size), dk_KTD[None], dv_KTD[None], None, None
