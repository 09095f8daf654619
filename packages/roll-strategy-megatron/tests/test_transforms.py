"""Transforms of the bridge put tensors where Megatron's layers look for them, and undo themselves."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_strategy_megatron.bridge.transforms import Copy, FuseGateUp, FuseQKV, Sizes, Vocabulary

GROUPS = st.integers(1, 4)


@given(
    tp=st.sampled_from([1, 2, 3]),
    groups=GROUPS,
    heads=GROUPS,
    head_dim=st.integers(1, 4),
    rest=st.integers(1, 3),
    fused=st.booleans(),
)
def test_fused_projections_come_apart_as_they_were(tp, groups, heads, head_dim, rest, fused):
    sizes = Sizes(num_heads=heads * groups * tp, num_groups=groups * tp, head_dim=head_dim, vocab=1, padded_vocab=1)
    rows = [sizes.num_heads * head_dim, sizes.num_groups * head_dim, sizes.num_groups * head_dim]
    parts = list(torch.arange(sum(rows) * rest).view(-1, rest).split(rows))
    stored = [torch.cat(parts)] if fused else parts
    transform = FuseQKV()
    shares = [transform.cut(transform.join(stored, sizes), rank, tp).reshape(-1, rest) for rank in range(tp)]
    shaped = [each.reshape(transform.whole_shape(each, tp, sizes)) for each in shares]
    again = transform.split(torch.cat(shaped, dim=0), len(stored), sizes)
    assert all(torch.equal(one, other) for one, other in zip(again, stored, strict=True))
    # A rank's first group: its queries stand before its key.
    assert torch.equal(shares[0][: heads * head_dim], parts[0][: heads * head_dim])
    assert torch.equal(shares[0][heads * head_dim : (heads + 1) * head_dim], parts[1][:head_dim])


@given(tp=st.sampled_from([1, 2, 3]), size=st.integers(1, 4), fused=st.booleans())
def test_gates_stand_before_the_rest_on_every_rank(tp, size, fused):
    sizes = Sizes(num_heads=1, num_groups=1, head_dim=1, vocab=1, padded_vocab=1)
    gate, up = torch.arange(2 * size * tp * 2).view(2, -1, 2)
    parts = [torch.cat([gate, up])] if fused else [gate, up]
    transform = FuseGateUp()
    shares = [transform.cut(transform.join(parts, sizes), rank, tp).reshape(-1, 2) for rank in range(tp)]
    for rank, share in enumerate(shares):
        here = slice(rank * size, (rank + 1) * size)
        assert torch.equal(share, torch.cat([gate[here], up[here]]))
    shaped = [each.reshape(transform.whole_shape(each, tp, sizes)) for each in shares]
    again = transform.split(torch.cat(shaped, dim=1), len(parts), sizes)
    assert all(torch.equal(one, other) for one, other in zip(again, parts, strict=True))


def test_gates_that_alternate_with_the_rest_are_taken_apart():
    """As gpt-oss stores them: inputs × outputs."""
    sizes = Sizes(num_heads=1, num_groups=1, head_dim=1, vocab=1, padded_vocab=1)
    stored = torch.tensor([[10, 20, 11, 21], [30, 40, 31, 41]])
    transform = FuseGateUp(transposed=True, interleaved=True)
    whole = transform.join([stored], sizes)
    assert whole.tolist() == [[[10, 30], [11, 31]], [[20, 40], [21, 41]]]
    assert torch.equal(transform.split(whole, 1, sizes)[0], stored)
    bias = FuseGateUp(interleaved=True)
    assert bias.join([stored[0]], sizes).tolist() == [[10, 11], [20, 21]]
    assert torch.equal(bias.split(bias.join([stored[0]], sizes), 1, sizes)[0], stored[0])
    down = Copy(tp_dim=1, transposed=True)
    assert torch.equal(down.join([stored], sizes), stored.T)
    assert torch.equal(down.split(stored.T, 1, sizes)[0], stored)


def test_rows_of_padding_are_zero_and_are_not_exported():
    sizes = Sizes(num_heads=1, num_groups=1, head_dim=1, vocab=3, padded_vocab=4)
    rows = torch.ones(3, 2)
    whole = Vocabulary().join([rows], sizes)
    assert whole.tolist() == [[1, 1]] * 3 + [[0, 0]]
    assert torch.equal(Vocabulary().split(whole, 1, sizes)[0], rows)


def test_a_copy_is_cut_where_the_rule_says():
    whole = torch.arange(6).view(2, 3)
    assert Copy(tp_dim=1).cut(whole, 2, 3).tolist() == [[2], [5]]
    assert Copy().cut(whole, 2, 3) is whole
