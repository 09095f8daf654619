"""Stands for kernels of flash-attn, which are CUDA's: each query by itself, in float64."""

from __future__ import annotations

from unittest.mock import patch

import torch


class Varlen:
    """A `VarlenKernel` that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, query, key, value, queries, keys, *, scale, window, softcap=0.0, sinks_H=None):
        self.calls += 1
        assert softcap == 0
        assert sinks_H is None
        for tokens, sequences in ((query, queries), (key, keys)):
            assert sequences.bounds.dtype == torch.int32
            assert sequences.longest == int(sequences.bounds.diff().max())
            assert int(sequences.bounds[-1]) == len(tokens)
        repeats = query.shape[1] // key.shape[1]
        rows = []
        bounds = (
            each.tolist() for each in (queries.bounds[:-1], queries.bounds[1:], keys.bounds[:-1], keys.bounds[1:])
        )
        for first_q, end_q, first_k, end_k in zip(*bounds, strict=True):
            before = (end_k - first_k) - (end_q - first_q)
            for at in range(end_q - first_q):
                last = before + at
                first = max(0, last - window + 1) if window else 0
                seen_keys, seen_values = (
                    each[first_k + first : first_k + last + 1].double().repeat_interleave(repeats, 1)
                    for each in (key, value)
                )
                scores = (query[first_q + at].double() * seen_keys).sum(-1) * scale
                rows.append((scores.softmax(0)[..., None] * seen_values).sum(0))
        return torch.stack(rows).to(query.dtype)


def with_kernel(rank, function, *arguments):
    """`function` on this rank, where the kernel takes everything; it must have been asked."""
    kernel = Varlen()
    with (
        patch("roll_strategy_megatron.attention.varlen_kernel", lambda *_args, **_named: kernel),
        patch("roll_modeling.attention.varlen_kernel", lambda *_args, **_named: kernel),
    ):
        found = function(rank, *arguments)
    assert kernel.calls
    return found
