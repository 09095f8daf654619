"""Reward normalisation, running statistics and whitening against numbers worked out by hand."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.algorithms.normalise import RewardNormaliser, RunningMoments, clip, moments_by, whiten
from roll_core.errors import NonFiniteError
from roll_testing.errors import raises_error

REWARDS = torch.tensor([1.0, 0.0, 1.0, 4.0])
GROUPS = torch.tensor([0, 0, 9, 9])
# group 0: mean 0.5, unbiased std sqrt(0.5); group 9: mean 2.5, std sqrt(4.5)
# batch: mean 1.5, squares 0.25 + 2.25 + 0.25 + 6.25 = 9, std sqrt(3)
GROUP_MEAN = [0.5, 0.5, 2.5, 2.5]
GROUP_STD = [math.sqrt(0.5), math.sqrt(0.5), math.sqrt(4.5), math.sqrt(4.5)]
MEANS = {None: [0.0] * 4, "group": GROUP_MEAN, "batch": [1.5] * 4, "running": [1.5] * 4}
STDS = {"group": GROUP_STD, "batch": [math.sqrt(3)] * 4, "running": [math.sqrt(3)] * 4}


@pytest.mark.parametrize("std", [None, "group", "batch", "running"])
@pytest.mark.parametrize("mean", [None, "group", "batch", "running"])
def test_every_combination_of_mean_and_deviation(mean, std):
    # ROLL raises KeyError('domain') for `running`, and returns [B/n, B] for std `group` with another mean.
    centred = [r - m for r, m in zip(REWARDS.tolist(), MEANS[mean], strict=True)]
    expected = centred if std is None else [c / (s + 1e-6) for c, s in zip(centred, STDS[std], strict=True)]
    out = RewardNormaliser(mean, std)(REWARDS, GROUPS)
    assert out.shape == (4,)
    assert out.tolist() == pytest.approx(expected, rel=1e-6)


def test_groups_need_not_be_neighbours_nor_of_one_size():
    # group 1: 0, 2, 4 with mean 2 and std 2; group 2: 1, 3 with mean 2 and std sqrt(2)
    rewards, groups = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]), torch.tensor([1, 2, 1, 2, 1])
    out = RewardNormaliser("group", "group")(rewards, groups)
    root = math.sqrt(0.5)
    assert out.tolist() == pytest.approx([-1, -root, 0, root, 1], abs=1e-5)


def test_equal_rewards_become_exactly_zero():
    out = RewardNormaliser("group", "group")(torch.full((6,), 0.1), torch.tensor([0, 0, 0, 1, 1, 1]))
    assert out.tolist() == [0.0] * 6


def test_a_group_of_one_becomes_zero():
    assert RewardNormaliser("group", "group")(torch.tensor([3.0]), torch.tensor([0])).tolist() == [0.0]


def test_no_spread_centres_without_scaling():
    # group 0 has no spread: its rewards keep their distance 1 - 0.5 from the batch's mean instead of exploding
    out = RewardNormaliser("batch", "group")(torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1]))
    assert out.tolist() == [0.5, 0.5, -0.5, -0.5]


def test_rewards_are_clipped_after_normalisation():
    out = RewardNormaliser("batch", None, clip=1.0)(torch.tensor([0.0, 10.0, 2.0]), torch.tensor([0, 0, 0]))
    assert out.tolist() == [-1.0, 1.0, -1.0]  # mean 4: -4, 6, -2


def test_no_reward_is_no_error():
    none = torch.tensor([])
    assert RewardNormaliser("group", "running")(none, none.long(), []).shape == (0,)


def test_domains_have_statistics_of_their_own():
    # math: 0, 2 with mean 1; code: 10, 20 with mean 15
    rewards, groups = torch.tensor([0.0, 10.0, 2.0, 20.0]), torch.tensor([0, 1, 0, 1])
    domains = ["math", "code", "math", "code"]
    for kind in ("batch", "running"):
        assert RewardNormaliser(kind, None)(rewards, groups, domains).tolist() == [-1, -5, 1, 5]


def test_running_statistics_cover_all_batches():
    # after 1, 3 and then 5, 7: mean 4, squares 9 + 1 + 1 + 9 = 20, std sqrt(20/3)
    normalise = RewardNormaliser("running", "running")
    groups = torch.tensor([0, 0])
    assert normalise(torch.tensor([1.0, 3.0]), groups).tolist() == pytest.approx([-0.70710, 0.70710], abs=1e-4)
    sigma = math.sqrt(20 / 3)
    assert normalise(torch.tensor([5.0, 7.0]), groups).tolist() == pytest.approx([1 / sigma, 3 / sigma], rel=1e-5)


def test_running_statistics_continue_after_a_resume():
    first, groups = RewardNormaliser("running", "running"), torch.tensor([0, 0])
    first(torch.tensor([1.0, 3.0]), groups, ["math", "code"])
    resumed = RewardNormaliser("running", "running")
    resumed.load_state(first.state())
    batch = (torch.tensor([5.0, 7.5]), groups, ["math", "code"])
    assert torch.equal(first(*batch), resumed(*batch))


def test_the_running_state_is_plain_values():
    import json

    normalise = RewardNormaliser("running", None)
    normalise(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), ["math", "math"])
    assert json.loads(json.dumps(normalise.state())) == {"math": {"count": 2, "mean": 1.5, "squares": 0.5}}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_an_error(poison):
    normalise = RewardNormaliser("running", "group")
    with raises_error(NonFiniteError, "rewards"):
        normalise(torch.tensor([0.0, poison]), torch.tensor([0, 0]))
    assert normalise.state() == {}


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-100, 100, width=32)), min_size=1, max_size=30))
def test_moments_equal_the_standard_librarys(rows):
    groups, values = [row[0] for row in rows], [row[1] for row in rows]
    means, stds = moments_by(torch.tensor(values), torch.tensor(groups))
    for i, group in enumerate(groups):
        members = [v for g, v in zip(groups, values, strict=True) if g == group]
        assert means[i].item() == pytest.approx(statistics.fmean(members), abs=1e-6)
        expected = statistics.stdev(members) if len(members) > 1 else 0.0
        assert stds[i].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), min_size=1, max_size=6))
def test_running_moments_equal_those_of_everything_at_once(batches):
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.tensor(batch, dtype=torch.float64))
    everything = [value for batch in batches for value in batch]
    assert moments.count == len(everything)
    assert moments.mean == pytest.approx(statistics.fmean(everything) if everything else 0.0, abs=1e-6)
    assert moments.std == pytest.approx(statistics.stdev(everything) if len(everything) > 1 else 0.0, abs=1e-5)


def test_clip_leaves_values_alone_without_a_bound():
    values = torch.tensor([-9.0, 9.0])
    assert clip(values, None) is values
    assert clip(values, 2.0).tolist() == [-2.0, 2.0]


def test_whitening_reads_only_masked_tokens():
    # masked values 1, 2, 3: mean 2, unbiased variance 1
    out = whiten(torch.tensor([1.0, math.nan, 2.0, 3.0]), torch.tensor([True, False, True, True]))
    assert out.tolist() == pytest.approx([-1, 0, 0, 1], abs=1e-6)


def test_whitening_of_one_or_of_equal_values_gives_zero():
    assert whiten(torch.tensor([5.0]), torch.tensor([True])).tolist() == [0.0]
    assert whiten(torch.full((3,), 5.0), torch.ones(3, dtype=torch.bool)).tolist() == [0.0] * 3


def test_whitening_refuses_non_finite_values():
    with pytest.raises(NonFiniteError):
        whiten(torch.tensor([1.0, math.nan]), torch.tensor([True, True]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 123.4, 255.0, 1e9, -1e12])
def test_equal_values_of_any_size_have_no_spread(value, dtype):
    equal = torch.full((11,), value, dtype=dtype)
    groups = torch.zeros(11, dtype=torch.int64)
    means, stds = moments_by(equal, groups)
    assert (equal.double() - means).tolist() == stds.tolist() == [0.0] * 11
    assert whiten(equal, torch.ones(11, dtype=torch.bool)).tolist() == [0.0] * 11
    moments = RunningMoments()
    for _ in range(3):
        moments.update(equal)
    assert (moments.mean, moments.std) == (float(equal[0]), 0.0)
    for kind in ("batch", "group", "running"):
        assert RewardNormaliser(kind, kind)(equal, groups).tolist() == [0.0] * 11


def test_rounding_is_no_spread_and_a_small_difference_is_one():
    # 255 and the next float32: a difference of 1.5e-5, which an absolute bound of 1e-6 takes for a signal.
    neighbours = torch.tensor([255.0, 255.0, float(np.nextafter(np.float32(255.0), np.float32(300.0)))])
    groups = torch.zeros(3, dtype=torch.int64)
    assert RewardNormaliser("group", "group")(neighbours, groups).abs().max() < 1e-4
    assert whiten(neighbours, torch.ones(3, dtype=torch.bool)).tolist() == [0.0] * 3
    # Rewards 1 and 0 keep their deviation beside a large constant: sqrt(1/3), mean 1/3 of three.
    shifted = torch.tensor([1e6, 1e6, 1e6 + 1])
    found = RewardNormaliser("group", "group")(shifted, groups)
    assert found.tolist() == pytest.approx([-(3**-0.5), -(3**-0.5), 2 * 3**-0.5], rel=1e-5)


def test_large_offsets_cost_no_digits_of_the_deviation():
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) + 1e9
    means, stds = moments_by(values, torch.zeros(3, dtype=torch.int64))
    assert (means.tolist(), stds.tolist()) == ([1e9 + 2] * 3, pytest.approx([1.0] * 3))
    moments = RunningMoments()
    for value in values:
        moments.update(value[None])
    assert (moments.mean, moments.std) == (1e9 + 2, pytest.approx(1.0))
