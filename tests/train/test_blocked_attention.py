"""Blocks of queries against the keys that they can see give what the library's attention gives."""

from __future__ import annotations

import pytest
import torch

from roll_kernels.blocked_attention import BLOCK, LONGEST, blocked_attention, usable

LENGTHS = [
    (1,),
    (5, 1, 9),
    (BLOCK,),
    (BLOCK + 1, 3),
    (2, 3 * BLOCK - 1, BLOCK),
    (12,) * 5,
    (1, 1),
    (7, 30, 1, 8, 29, BLOCK, 3, BLOCK - 1, 2 * BLOCK + 1, 26),
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (3, 3), (4, 1)])
def test_values_and_gradients_equal_the_librarys(lengths, heads, key_heads):
    torch.manual_seed(0)
    tokens, size = sum(lengths), 8
    query = torch.randn(1, tokens, heads, size).transpose(1, 2).requires_grad_()
    key = torch.randn(1, tokens, key_heads, size).transpose(1, 2).requires_grad_()
    value = torch.randn(1, tokens, key_heads, size).transpose(1, 2).requires_grad_()
    parts, start = [], 0
    for length in lengths:
        span = slice(start, start + length)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, span], key[:, :, span], value[:, :, span], is_causal=True, scale=0.3, enable_gqa=True
        )
        parts.append(attended.transpose(1, 2))
        start += length
    plain = torch.cat(parts, dim=1)
    found = blocked_attention(query, key, value, lengths, 0.3)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)
    upstream = torch.randn_like(plain)
    wanted = [query, key, value]
    expected = torch.autograd.grad(plain, wanted, upstream)
    for each, other in zip(torch.autograd.grad(found, wanted, upstream), expected, strict=True):
        torch.testing.assert_close(each, other, rtol=0, atol=1e-5)


def test_non_finite_sequence_does_not_affect_its_batch():
    torch.manual_seed(0)
    lengths, size = (6, 8, 7), 4
    query, key, value = (torch.randn(1, 2, sum(lengths), size, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        value[:, :, 7] = float("nan")
    found = blocked_attention(query, key, value, lengths, 0.5)
    gradients = torch.autograd.grad(found[:, :6].sum() + found[:, 14:].sum(), (query, key, value))
    assert torch.isfinite(found[:, :6]).all()
    assert torch.isfinite(found[:, 14:]).all()
    for each in gradients:
        assert torch.isfinite(each[:, :, :6]).all()
        assert torch.isfinite(each[:, :, 14:]).all()


def test_attention_falls_back_if_its_weights_need_much_memory():
    query = torch.zeros(1, 1, 1, 1)
    assert usable(query, (1, LONGEST))
    assert not usable(query, (1, LONGEST + 1))
    assert not usable(query.bfloat16(), (1,))


def test_sequences_beyond_the_limit_are_computed_by_the_library(build):
    import numpy as np

    from roll_core.data.pack import pack
    from roll_core.spec.train import WantedOutputs
    from roll_core.types import TrainSequence

    length = LONGEST + 8
    row = TrainSequence(id="long", tokens=np.arange(length) % 61, loss_mask=np.arange(length) > 0)
    (micro,) = pack([row])
    found = build(forward_only=True).forward(micro, WantedOutputs(logprobs=True)).logprobs_T
    expected = (
        build(forward_only=True, attn_implementation="sdpa").forward(micro, WantedOutputs(logprobs=True)).logprobs_T
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
