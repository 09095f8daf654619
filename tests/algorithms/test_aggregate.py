"""The four masked aggregations, by hand and however the batch is split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.algorithms.aggregate import aggregate
from roll_core.errors import UnsupportedError
from roll_core.types import Totals
from roll_testing.errors import raises_error

# first sequence: 1, 2 masked in; second: 3, 4, 6
VALUES = torch.tensor([100.0, 1, 2, 3, 4, 6, 100])
MASKS = [[0, 1, 1], [1, 1, 1, 0]]
BY_HAND = {
    "token-mean": 16 / 5,
    "seq-mean-token-sum": (3 + 13) / 2,
    "seq-mean-token-mean": (3 / 2 + 13 / 3) / 2,
    "seq-mean-token-sum-norm": (3 / 8 + 13 / 8) / 2,
}


@pytest.mark.parametrize("mode", BY_HAND)
def test_aggregations_by_hand(mode, micro_of):
    # ROLL's token-mean adds up what is off the mask: 216 / 5 here.
    assert aggregate(VALUES, micro_of(MASKS, max_length=8), mode).item() == pytest.approx(BY_HAND[mode])


@pytest.mark.parametrize("mode", BY_HAND)
def test_shares_of_microbatches_add_up(mode, micro_of):
    totals = Totals(tokens=5, sequences=2, rollouts=2, groups=2, max_length=8)
    first = aggregate(VALUES[:3], micro_of(MASKS[:1], totals=totals), mode)
    second = aggregate(VALUES[3:], micro_of(MASKS[1:], totals=totals), mode)
    assert (first + second).item() == pytest.approx(BY_HAND[mode])


# The same two rollouts in three rows, and what a mean over rows would be.
CUT = [[0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0]]
CUT_VALUES = torch.tensor([100.0, 1, 2, 3, 0, 0, 0, 3, 4, 6, 100])


@pytest.mark.parametrize("mode", BY_HAND)
def test_rows_of_a_rollout_are_aggregated_as_one_sequence(mode, micro_of):
    micro = micro_of(CUT, rollouts=[0, 1, 1], max_length=8)
    assert aggregate(CUT_VALUES, micro, mode).item() == pytest.approx(BY_HAND[mode])
    rows = aggregate(CUT_VALUES, micro_of(CUT, max_length=8), mode).item()
    assert (rows == pytest.approx(BY_HAND[mode])) == (mode == "token-mean")


@pytest.mark.parametrize("mode", BY_HAND)
def test_masked_tokens_change_neither_value_nor_gradient(mode, micro_of):
    values = torch.tensor([math.nan, 1, 2, 3, 4, 6, math.inf], requires_grad=True)
    out = aggregate(values, micro_of(MASKS, max_length=8), mode)
    out.backward()
    assert out.item() == pytest.approx(BY_HAND[mode])
    assert values.grad[[0, 6]].tolist() == [0, 0]
    assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize("mode", BY_HAND)
def test_nothing_masked_in_is_zero_with_a_gradient_of_zero(mode, micro_of):
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    out = aggregate(values, micro_of([[0, 0]]), mode)
    out.backward()
    assert out.item() == 0.0
    assert values.grad.tolist() == [0, 0]


@pytest.mark.parametrize("mode", BY_HAND)
def test_a_sequence_without_masked_tokens_does_not_count(mode, micro_of):
    padded = torch.cat([VALUES, torch.tensor([9.0, 9.0])])
    assert aggregate(padded, micro_of([*MASKS, [0, 0]], max_length=8), mode).item() == pytest.approx(BY_HAND[mode])


def test_an_unknown_mode_is_named(micro_of):
    with raises_error(UnsupportedError, "seq-mean-token-sum-norm"):
        aggregate(VALUES, micro_of(MASKS), "tokens")


def loop_aggregate(values, masks, mode, max_length):
    sums = [sum(v for v, m in zip(row, mask, strict=True) if m) for row, mask in zip(values, masks, strict=True)]
    counts = [sum(mask) for mask in masks]
    taking_part = [(s, n) for s, n in zip(sums, counts, strict=True) if n]
    if not taking_part:
        return 0.0
    if mode == "token-mean":
        return sum(sums) / sum(counts)
    per_sequence = {
        "seq-mean-token-sum": [s for s, _ in taking_part],
        "seq-mean-token-mean": [s / n for s, n in taking_part],
        "seq-mean-token-sum-norm": [s / max_length for s, _ in taking_part],
    }[mode]
    return sum(per_sequence) / len(per_sequence)


@pytest.mark.parametrize("mode", BY_HAND)
@settings(max_examples=40)
@given(st.lists(st.lists(st.tuples(st.integers(0, 1), st.floats(-5, 5, width=32)), min_size=1), min_size=1, max_size=6))
def test_aggregations_equal_loops_over_tokens(mode, micro_of, sequences):
    masks = [[mask for mask, _ in sequence] for sequence in sequences]
    values = [[value for _, value in sequence] for sequence in sequences]
    flat = torch.tensor([value for row in values for value in row])
    out = aggregate(flat, micro_of(masks, max_length=9), mode)
    assert out.item() == pytest.approx(loop_aggregate(values, masks, mode, 9), rel=1e-5, abs=1e-5)
