"""torch's operators of flash-attn for a device without them, sequence by sequence in float64."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

FORWARD, BACKWARD = "_flash_attention_forward", "_flash_attention_backward"


@contextmanager
def flash_operators(key: str = "CPU") -> Iterator[list[str]]:
    """Register both operators for a dispatch key. Yields the names of the operators that are called."""
    calls: list[str] = []

    def forward(*args: Any, **named: Any) -> Any:
        calls.append(FORWARD)
        return flash_forward(*args, **named)

    def backward(*args: Any, **named: Any) -> Any:
        calls.append(BACKWARD)
        return flash_backward(*args, **named)

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(FORWARD, forward, key)
    library.impl(BACKWARD, backward, key)
    try:
        yield calls
    finally:
        library._destroy()


def flash_forward(query: Tensor, key: Tensor, value: Tensor, *where: Any, **named: Any) -> Any:
    """`aten::_flash_attention_forward` of `[T, H, D]` tensors, without dropout."""
    out, lse_HT = torch.zeros_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    for q, k, scores_HLS in _scores(query, key, *where[:6], **named):
        lse_HT[:, q] = scores_HLS.logsumexp(-1).float()
        out[q] = torch.einsum("hls,shd->lhd", scores_HLS.softmax(-1), _repeated(value[k], query)).to(out.dtype)
    nothing = query.new_empty(0)
    return out, lse_HT, query.new_zeros(2, dtype=torch.uint64), nothing.to(torch.uint64), nothing


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse_HT: Tensor,
    *where: Any,
    **named: Any,
) -> tuple[Tensor, ...]:
    """`aten::_flash_attention_backward`: weights are recomputed from the LSE, as in the kernels."""
    dq, dk, dv = (torch.zeros_like(each, dtype=torch.float64) for each in (query, key, value))
    for q, k, scores_HLS in _scores(query, key, *where[:6], **named):
        weights_HLS = (scores_HLS - lse_HT[:, q, None]).exp()
        g, keys, values = grad[q].double(), _repeated(key[k], query), _repeated(value[k], query)
        delta_HL1 = (g * out[q].double()).sum(-1).T[..., None]
        d_scores_HLS = weights_HLS * (torch.einsum("lhd,shd->hls", g, values) - delta_HL1) * named["scale"]
        dq[q] = torch.einsum("hls,shd->lhd", d_scores_HLS, keys)
        for d, by_head in (
            (dk, torch.einsum("hls,lhd->shd", d_scores_HLS, query[q].double())),
            (dv, torch.einsum("hls,lhd->shd", weights_HLS, g)),
        ):
            shared = query.shape[1] // d.shape[1]
            d[k] = by_head.view(-1, d.shape[1], shared, d.shape[2]).sum(2)
    return tuple(each.to(query.dtype) for each in (dq, dk, dv))


def _scores(
    query: Tensor,
    key: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    *,
    scale: float,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Per sequence: its queries, its keys, and masked scores `[H, L, S]`. Refuses what the kernels refuse."""
    bounds = [each.tolist() for each in (bounds_q, bounds_k)]
    longest = [max(end - first for first, end in pairwise(each)) for each in bounds]
    right = 0 if causal else window_size_right
    refused = {
        "data type": query.dtype not in (torch.float16, torch.bfloat16),
        "head size": query.shape[-1] % 8 != 0 or query.shape[-1] > 256,
        "bounds": any(each.dtype != torch.int32 for each in (bounds_q, bounds_k)),
        "longest": longest != [longest_q, longest_k],
        "dropout": dropout != 0,
        "strides": query.stride(-1) != 1 or key.stride(-1) != 1,
    }
    if any(refused.values()):
        raise RuntimeError(f"flash-attn refuses: {[name for name, found in refused.items() if found]}")
    for (q0, q1), (k0, k1) in zip(*map(pairwise, bounds), strict=True):
        scores = torch.einsum("lhd,shd->hls", query[q0:q1].double(), _repeated(key[k0:k1], query)) * scale
        ahead = torch.arange(k1 - k0) - torch.arange(q1 - q0)[:, None] - (k1 - k0) + (q1 - q0)
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if right >= 0:
            hidden |= ahead > right
        if window_size_left >= 0:
            hidden |= ahead < -window_size_left
        yield slice(q0, q1), slice(k0, k1), scores.masked_fill(hidden.to(scores.device), -torch.inf)


def _repeated(each: Tensor, query: Tensor) -> Tensor:
    return each.double().repeat_interleave(query.shape[1] // each.shape[1], dim=1)
