"""Importance weights and bands, against numbers worked out by hand and by loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_core.algorithms.correction import Band, importance_weights, inside

# Two sequences: prompt, two turns with a tool's token between them; prompt, two tokens.
MASK = torch.tensor([False, True, True, False, True, False, True, True])
SEGMENTS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
D = torch.tensor([9.0, 0.1, 0.3, 9.0, -0.4, 9.0, 0.2, -0.1])
BEHAVIOUR = torch.full((8,), -1.0)
OLD = BEHAVIOUR + D


def weights(level, bound=100.0):
    return importance_weights(OLD, BEHAVIOUR, MASK, SEGMENTS, level=level, upper_bound=bound)


@pytest.mark.parametrize(
    ("level", "logs"),
    [
        ("token", [0.1, 0.3, -0.4, 0.2, -0.1]),
        ("segment", [0.2, 0.2, -0.4, 0.05, 0.05]),
        ("geometric", [0.0, 0.0, 0.0, 0.05, 0.05]),
        ("sequence", [0.0, 0.0, 0.0, 0.1, 0.1]),
    ],
)
def test_weights_are_the_ratio_at_their_level_and_zero_off_the_mask(level, logs):
    found = weights(level)
    assert found[MASK].tolist() == pytest.approx([math.exp(x) for x in logs], rel=1e-5)
    assert (found[~MASK] == 0).all()


def test_weights_are_truncated_from_above_and_never_raised():
    assert weights("token", 1.2)[MASK].tolist() == pytest.approx(
        [math.exp(0.1), 1.2, math.exp(-0.4), 1.2, math.exp(-0.1)], rel=1e-5
    )


def test_equal_policies_have_weights_of_exactly_one():
    for level in ("token", "segment", "geometric", "sequence"):
        found = importance_weights(OLD, OLD, MASK, SEGMENTS, level=level, upper_bound=1.2)
        assert found[MASK].eq(1).all()


def test_what_stands_off_the_mask_is_not_looked_at():
    spoilt = torch.where(MASK, OLD, torch.nan)
    for level in ("token", "segment", "geometric", "sequence"):
        found = importance_weights(spoilt, BEHAVIOUR, MASK, SEGMENTS, level=level, upper_bound=9.0)
        assert torch.equal(found, importance_weights(OLD, BEHAVIOUR, MASK, SEGMENTS, level=level, upper_bound=9.0))


def test_a_ratio_of_any_size_is_a_number():
    far = BEHAVIOUR + 500
    assert importance_weights(far, BEHAVIOUR, MASK, SEGMENTS, level="sequence", upper_bound=2.0)[MASK].eq(2).all()
    assert inside(Band(level="sequence", ratio=(0.5, 2.0)), far, BEHAVIOUR, MASK, SEGMENTS).sum() == 0


def test_bands_keep_what_lies_within_bounds_included():
    def kept(level, ratio=None, difference=None):
        band = Band(level=level, ratio=ratio, difference=difference)
        return inside(band, OLD, BEHAVIOUR, MASK, SEGMENTS)[MASK].tolist()

    assert kept("token", (0.8, 1.2)) == [True, False, False, False, True]
    assert kept("segment", (0.8, 1.3)) == [True, True, False, True, True]
    assert kept("geometric", (1.0, 1.01)) == [True, True, True, False, False]
    # exp(-0.9) - exp(-1) = 0.039, exp(-0.7) - ... = 0.129, exp(-1.4) - ... = -0.121, 0.081, -0.035
    assert kept("token", difference=(-0.1, 0.1)) == [True, False, False, True, True]
    assert kept("segment", difference=(-0.1, 0.1)) == [True, True, False, True, True]
    assert kept("token", (0.8, 1.2), (0.0, 1.0)) == [True, False, False, False, False]


def test_an_empty_mask_is_no_error():
    none = torch.zeros_like(MASK)
    for level in ("token", "segment", "geometric", "sequence"):
        assert not importance_weights(OLD, BEHAVIOUR, none, SEGMENTS, level=level, upper_bound=1.0).any()


@given(st.lists(st.lists(st.tuples(st.booleans(), st.floats(-3, 3)), min_size=1, max_size=8), min_size=1, max_size=5))
def test_levels_agree_with_loops_over_the_sequences(sequences):
    mask = torch.tensor([drawn for each in sequences for drawn, _ in each])
    d = torch.tensor([value for each in sequences for _, value in each])
    segments = torch.tensor([i for i, each in enumerate(sequences) for _ in each])
    expected = {"segment": [], "geometric": [], "sequence": []}
    for each in sequences:
        drawn = [value for on, value in each if on]
        runs, run = [], []
        for on, value in [*each, (False, 0.0)]:
            if on:
                run.append(value)
            elif run:
                runs.append(run)
                run = []
        expected["segment"] += [sum(run) / len(run) for run in runs for _ in run]
        expected["geometric"] += [sum(drawn) / len(drawn)] * len(drawn) if drawn else []
        expected["sequence"] += [sum(drawn)] * len(drawn)
    zeros = torch.zeros_like(d)
    for level, logs in expected.items():
        found = importance_weights(d, zeros, mask, segments, level=level, upper_bound=1e9)[mask]
        assert found.log().tolist() == pytest.approx([max(-20.0, min(20.0, x)) for x in logs], abs=1e-4)
