"""Stands for torch's kernels of flash-attn 2, which are CUDA's: each query by itself, in float64."""

from __future__ import annotations

from unittest.mock import patch

import torch


class Varlen:
    """Queries are the last of what they see; each sees `left` keys before itself, all where that is -1."""

    def __init__(self):
        self.calls = 0

    def __call__(self, query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
        self.calls += 1
        left, right = window_size
        assert right == 0
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert enable_gqa == (query.shape[1] != key.shape[1])
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert max_q == int(cu_q.diff().max())
        assert max_k == int(cu_k.diff().max())
        assert (int(cu_q[-1]), int(cu_k[-1])) == (len(query), len(key))
        repeats = query.shape[1] // key.shape[1]
        rows = []
        bounds = (each.tolist() for each in (cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]))
        for first_q, end_q, first_k, end_k in zip(*bounds, strict=True):
            before = (end_k - first_k) - (end_q - first_q)
            for at in range(end_q - first_q):
                last = before + at
                first = 0 if left < 0 else max(0, last - left)
                keys, values = (
                    each[first_k + first : first_k + last + 1].double().repeat_interleave(repeats, 1)
                    for each in (key, value)
                )
                scores = (query[first_q + at].double() * keys).sum(-1) * scale
                rows.append((scores.softmax(0)[..., None] * values).sum(0))
        return torch.stack(rows).to(query.dtype)


def with_kernel(rank, function, *arguments):
    """`function` on this rank, where the kernel takes everything; it must have been asked."""
    kernel = Varlen()
    with (
        patch("roll_strategy_megatron.attention.kernel_takes", lambda query: True),
        patch("roll_strategy_megatron.attention.varlen_attn", kernel),
    ):
        found = function(rank, *arguments)
    assert kernel.calls
    return found
