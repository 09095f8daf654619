"""Causal attention of short sequences on the host, in blocks of queries against only their visible keys.

The library's kernel computes the whole square of a short sequence and discards the upper half. Blocks of 64 queries
skip most of that half. Query heads that share a key head become rows of one matrix. Sequences of at most one block are
batched with others of similar length, so that one kernel call serves hundreds of them.

Shapes: T flat tokens, K key heads, G query heads of each, D head size, B queries of a block, E keys visible to a block,
S sequences of a batch, L length of the longest of them, R rows (tokens × G).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BLOCK = 64
STEP = 8
"""Sequences of at most one block are batched if their lengths, rounded up to this multiple, are equal."""
LONGEST = 512
"""Maximum sequence length. Attention weights are kept for the backward pass, which takes too much memory beyond it."""


def usable(query: Tensor, lengths: Sequence[int]) -> bool:
    """True if `blocked_attention` supports these inputs and is faster than the library's kernel."""
    return query.device.type == "cpu" and query.dtype == torch.float32 and max(lengths) <= LONGEST


def blocked_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Causal attention: `[1, K * G, T, D]` queries and `[1, K, T, D]` keys and values to `[1, T, K * G, D]`."""
    attended: Tensor = _Blocked.apply(query, key, value, tuple(lengths), scale)  # type: ignore[no-untyped-call]
    return attended


@dataclass(frozen=True, slots=True, eq=False)
class _Together:
    """Batch of sequences of similar length, padded to rows of L tokens."""

    rows: Tensor
    """Token indices, `[S * L]`; T for padding. Padding comes last in a row, so no query sees it."""
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    together: tuple[_Together, ...]
    blocks: tuple[tuple[int, int, int], ...]
    """Blocks of the unbatched sequences: start of the sequence, start and end of the block."""


@lru_cache(maxsize=64)
def _plan(lengths: tuple[int, ...]) -> _Plan:
    bounds = list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))
    alike = defaultdict(list)
    for first, end in bounds:
        if end - first <= BLOCK:
            alike[-(-(end - first) // STEP)].append((first, end))
    together = tuple(_together(bound, bounds[-1][1]) for bound in alike.values() if len(bound) > 1)
    alone = [bound for bound in bounds if len(alike.get(-(-(bound[1] - bound[0]) // STEP), ())) < 2]
    blocks = ((first, start, min(start + BLOCK, end)) for first, end in alone for start in range(first, end, BLOCK))
    return _Plan(together, tuple(blocks))


def _together(sequences: Sequence[tuple[int, int]], nothing: int) -> _Together:
    starts, ends = torch.tensor(sequences).unbind(1)
    length = int((ends - starts).max())
    rows_SL = starts[:, None] + torch.arange(length)
    return _Together(torch.where(rows_SL < ends[:, None], rows_SL, nothing).flatten(), length)


@lru_cache(maxsize=256)
def _future(queries: int, groups: int) -> Tensor:
    """Mask `[B * G, B]`: minus infinity where the key follows the query."""
    mask = torch.full((queries, queries), float("-inf")).triu_(1)
    return mask.repeat_interleave(groups, dim=0)


class _Blocked(torch.autograd.Function):
    """Autograd function. Tensors `[K, T + 1, ...]` end with a row of zeros, which padding reads."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
        _, heads, tokens, size = query.shape
        num_keys = key.shape[1]
        groups = heads // num_keys
        # A token's query heads are adjacent, so a block of tokens is a block of rows.
        q_KTGD = query.new_empty(num_keys, tokens + 1, groups, size)
        torch.mul(query.view(num_keys, groups, tokens, size).transpose(1, 2), scale, out=q_KTGD[:, :tokens])
        q_KTGD[:, tokens] = 0
        k_KTD, v_KTD = _with_zeros(key[0]), _with_zeros(value[0])
        out_KTGD = torch.empty_like(q_KTGD)
        keeps = any(ctx.needs_input_grad)
        weights: list[Tensor] = []
        plan = _plan(lengths)
        for batch in plan.together:
            q_SRD, k_SLD, v_SLD = (_gather(x, batch) for x in (q_KTGD, k_KTD, v_KTD))
            scores_SRL = torch.bmm(q_SRD, k_SLD.transpose(1, 2))
            weights_SRL = torch.softmax(scores_SRL.add_(_future(batch.length, groups)), dim=-1)
            _scatter(out_KTGD, batch, torch.bmm(weights_SRL, v_SLD))
            if keeps:
                weights.append(weights_SRL)
        q_KRD, out_KRD = q_KTGD.view(num_keys, -1, size), out_KTGD.view(num_keys, -1, size)
        for first, start, end in plan.blocks:
            rows = slice(start * groups, end * groups)
            scores_KRE = torch.bmm(q_KRD[:, rows], k_KTD[:, first:end].transpose(1, 2))
            scores_KRE[:, :, start - first :] += _future(end - start, groups)
            weights_KRE = torch.softmax(scores_KRE, dim=-1)
            out_KRD[:, rows] = torch.bmm(weights_KRE, v_KTD[:, first:end])
            if keeps:
                weights.append(weights_KRE)
        ctx.save_for_backward(q_KTGD, k_KTD, v_KTD, *weights)
        ctx.plan, ctx.scale = plan, scale
        return out_KTGD[:, :tokens].transpose(0, 1).reshape(1, tokens, heads, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_KTGD, k_KTD, v_KTD, *saved = ctx.saved_tensors
        num_keys, tokens, groups, size = q_KTGD.shape
        tokens -= 1
        d_KTGD = _with_zeros(grads[0].view(tokens, num_keys, groups, size).transpose(0, 1))
        dq_KTGD = torch.empty_like(q_KTGD)
        dk_KTD, dv_KTD = torch.zeros_like(k_KTD), torch.zeros_like(v_KTD)
        weights = iter(saved)
        for batch in ctx.plan.together:
            weights_SRL = next(weights)
            q_SRD, k_SLD, v_SLD, d_SRD = (_gather(x, batch) for x in (q_KTGD, k_KTD, v_KTD, d_KTGD))
            _scatter(dv_KTD, batch, torch.bmm(weights_SRL.transpose(1, 2), d_SRD))
            d_weights_SRL = torch.bmm(d_SRD, v_SLD.transpose(1, 2))
            d_scores_SRL = torch._softmax_backward_data(d_weights_SRL, weights_SRL, -1, torch.float32)
            _scatter(dq_KTGD, batch, torch.bmm(d_scores_SRL, k_SLD))
            _scatter(dk_KTD, batch, torch.bmm(d_scores_SRL.transpose(1, 2), q_SRD))
        q_KRD, d_KRD, dq_KRD = (x.view(num_keys, -1, size) for x in (q_KTGD, d_KTGD, dq_KTGD))
        for first, start, end in ctx.plan.blocks:
            weights_KRE = next(weights)
            rows, keys = slice(start * groups, end * groups), slice(first, end)
            dv_KTD[:, keys].baddbmm_(weights_KRE.transpose(1, 2), d_KRD[:, rows])
            d_weights_KRE = torch.bmm(d_KRD[:, rows], v_KTD[:, keys].transpose(1, 2))
            d_scores_KRE = torch._softmax_backward_data(d_weights_KRE, weights_KRE, -1, torch.float32)
            dq_KRD[:, rows] = torch.bmm(d_scores_KRE, k_KTD[:, keys])
            dk_KTD[:, keys].baddbmm_(d_scores_KRE.transpose(1, 2), q_KRD[:, rows])
        dq = dq_KTGD[:, :tokens].mul_(ctx.scale).permute(0, 2, 1, 3)
        dq = dq.reshape(1, num_keys * groups, tokens, size)
        return dq, dk_KTD[None, :, :tokens], dv_KTD[None, :, :tokens], None, None


def _with_zeros(x_KT: Tensor) -> Tensor:
    """Copy of `x_KT` with one more token, of zeros."""
    num_keys, tokens, *rest = x_KT.shape
    longer = x_KT.new_empty(num_keys, tokens + 1, *rest)
    longer[:, :tokens] = x_KT
    longer[:, tokens] = 0
    return longer


def _gather(x_KT: Tensor, chosen: _Together) -> Tensor:
    """Select a batch's tokens: `[K, T + 1, (G,) D]` to `[K * S, L (* G), D]`."""
    num_keys, size = x_KT.shape[0], x_KT.shape[-1]
    per_token = x_KT[0, 0].numel() // size
    picked = x_KT.flatten(2).index_select(1, chosen.rows)
    return picked.view(num_keys * (len(chosen.rows) // chosen.length), chosen.length * per_token, size)


def _scatter(x_KT: Tensor, chosen: _Together, rows: Tensor) -> None:
    """Inverse of `_gather`. Padding is written to the additional row."""
    x_KT.flatten(2).index_copy_(1, chosen.rows, rows.view(x_KT.shape[0], len(chosen.rows), -1))
