"""Importance weights and bands, against numbers worked out by hand and by loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_core.algorithms.correction import importance_weights, inside, normalise_weights, off_policy_mask
from roll_core.algorithms.correction_options import CorrectionFilterConfig, ImportanceWeightConfig

# Two sequences: prompt, two turns with a tool's token between them; prompt, two tokens.
MASK = torch.tensor([False, True, True, False, True, False, True, True])
SEGMENTS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
D = torch.tensor([9.0, 0.1, 0.3, 9.0, -0.4, 9.0, 0.2, -0.1])
BEHAVIOUR = torch.full((8,), -1.0)
OLD = BEHAVIOUR + D


def weigh(*batch, level, **bounds):
    return importance_weights(ImportanceWeightConfig(weight_type=level, **bounds), *batch)


def weights(level, bound=100.0):
    return weigh(OLD, BEHAVIOUR, MASK, SEGMENTS, level=level, upper_bound=bound)


@pytest.mark.parametrize(
    ("level", "logs"),
    [
        ("token", [0.1, 0.3, -0.4, 0.2, -0.1]),
        ("segment", [0.2, 0.2, -0.4, 0.05, 0.05]),
        ("geometric", [0.0, 0.0, 0.0, 0.05, 0.05]),
        ("sequence", [0.0, 0.0, 0.0, 0.1, 0.1]),
    ],
)
def test_weights_are_ratios_at_their_level_and_zero_if_masked(level, logs):
    found = weights(level)
    assert found[MASK].tolist() == pytest.approx([math.exp(x) for x in logs], rel=1e-5)
    assert (found[~MASK] == 0).all()


def test_weights_are_truncated_from_above_and_never_raised():
    assert weights("token", 1.2)[MASK].tolist() == pytest.approx(
        [math.exp(0.1), 1.2, math.exp(-0.4), 1.2, math.exp(-0.1)], rel=1e-5
    )


def test_equal_policies_have_weights_of_exactly_one():
    for level in ("token", "segment", "geometric", "sequence"):
        found = weigh(OLD, OLD, MASK, SEGMENTS, level=level, upper_bound=1.2)
        assert found[MASK].eq(1).all()


def test_masked_tokens_do_not_change_weights():
    spoilt = torch.where(MASK, OLD, torch.nan)
    for level in ("token", "segment", "geometric", "sequence"):
        found = weigh(spoilt, BEHAVIOUR, MASK, SEGMENTS, level=level, upper_bound=9.0)
        assert torch.equal(found, weigh(OLD, BEHAVIOUR, MASK, SEGMENTS, level=level, upper_bound=9.0))


def test_a_ratio_of_any_size_is_a_number():
    far = BEHAVIOUR + 500
    assert weigh(far, BEHAVIOUR, MASK, SEGMENTS, level="sequence", upper_bound=2.0)[MASK].eq(2).all()
    assert (
        inside(
            CorrectionFilterConfig(agg_type="sequence", ratio_low=0.5, ratio_high=2.0), far, BEHAVIOUR, MASK, SEGMENTS
        ).sum()
        == 0
    )


def test_bands_keep_what_lies_within_bounds_included():
    def kept(level, ratio=None, difference=None):
        low, high = ratio or (0.8, 1.2)
        diff_low, diff_high = difference or (-0.2, 0.2)
        config = CorrectionFilterConfig(
            agg_type=level,
            ratio_enabled=ratio is not None,
            ratio_low=low,
            ratio_high=high,
            diff_enabled=difference is not None,
            diff_low=diff_low,
            diff_high=diff_high,
        )
        return inside(config, OLD, BEHAVIOUR, MASK, SEGMENTS)[MASK].tolist()

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
        found = weigh(OLD, BEHAVIOUR, none, SEGMENTS, level=level, upper_bound=1.0)
        assert not normalise_weights(found, none, SEGMENTS, level).any()
        assert not inside(
            CorrectionFilterConfig(agg_type=level, ratio_enabled=False, k2_max=1.0), OLD, BEHAVIOUR, none, SEGMENTS
        ).any()
    assert not off_policy_mask(-torch.ones(8), OLD, BEHAVIOUR, none, SEGMENTS, 0.0).any()


def test_masked_weights_are_zero_outside_the_bounds():
    def found(level, low, high):
        return weigh(OLD, BEHAVIOUR, MASK, SEGMENTS, level=level, lower_bound=low, upper_bound=high, outside="mask")[
            MASK
        ].tolist()

    # IcePop: exp(0.3) = 1.35 and exp(0.2) = 1.22 are above 1.2, exp(-0.4) = 0.67 is below 0.7.
    assert found("token", 0.7, 1.2) == pytest.approx([math.exp(0.1), 0, 0, 0, math.exp(-0.1)], rel=1e-5)
    # MIS: the sequences have ratios 1 and exp(0.1) = 1.105.
    assert found("sequence", 0.0, 1.1) == pytest.approx([1, 1, 1, 0, 0], rel=1e-5)
    assert found("sequence", 1.01, 3.0) == pytest.approx([0, 0, 0, math.exp(0.1), math.exp(0.1)], rel=1e-5)


def test_truncated_weights_have_a_lower_bound():
    found = weigh(OLD, BEHAVIOUR, MASK, SEGMENTS, level="token", lower_bound=0.8, upper_bound=1.2)
    assert found[MASK].tolist() == pytest.approx([math.exp(0.1), 1.2, 0.8, 1.2, math.exp(-0.1)], rel=1e-5)


def test_the_clamp_of_log_ratios_bounds_weights():
    config = ImportanceWeightConfig(weight_type="sequence", upper_bound=1e9)
    found = importance_weights(config, OLD, BEHAVIOUR, MASK, SEGMENTS, log_ratio_clamp=0.05)
    assert found[MASK].tolist() == pytest.approx([1, 1, 1, math.exp(0.05), math.exp(0.05)], rel=1e-5)


@pytest.mark.parametrize(
    ("level", "mean"),
    [
        ("token", sum(map(math.exp, [0.1, 0.3, -0.4, 0.2, -0.1])) / 5),
        ("segment", (math.exp(0.2) + math.exp(-0.4) + math.exp(0.05)) / 3),
        ("geometric", (1 + math.exp(0.05)) / 2),
        ("sequence", (1 + math.exp(0.1)) / 2),
    ],
)
def test_normalised_weights_have_mean_one_at_their_level(level, mean):
    plain = weights(level)
    found = normalise_weights(plain, MASK, SEGMENTS, level)
    assert found.tolist() == pytest.approx((plain / mean).tolist(), rel=1e-5)


def test_weights_that_are_all_zero_stay_zero():
    assert not normalise_weights(torch.zeros(8), MASK, SEGMENTS, "token").any()


@pytest.mark.parametrize(
    ("level", "k2", "k3"),
    [
        ("token", [0.005, 0.045, 0.08, 0.02, 0.005], [0.00517, 0.04986, 0.07032, 0.0214, 0.00484]),
        ("segment", [0.025, 0.025, 0.08, 0.0125, 0.0125], [0.02751, 0.02751, 0.07032, 0.01312, 0.01312]),
        ("geometric", [0.13 / 3] * 3 + [0.0125] * 2, [0.04178] * 3 + [0.01312] * 2),
        ("sequence", [0.13] * 3 + [0.025] * 2, [0.12535] * 3 + [0.02624] * 2),
        ("max", [0.08] * 3 + [0.02] * 2, [0.07032] * 3 + [0.0214] * 2),
    ],
)
def test_bands_of_k2_and_k3_keep_up_to_their_maximum(level, k2, k3):
    for name, values in (("k2_max", k2), ("k3_max", k3)):
        for bound in sorted(set(values)):
            config = CorrectionFilterConfig(agg_type=level, ratio_enabled=False, **{name: bound + 1e-4})
            kept = inside(config, OLD, BEHAVIOUR, MASK, SEGMENTS)[MASK].tolist()
            assert kept == [value <= bound + 1e-4 for value in values]
        assert not inside(
            CorrectionFilterConfig(agg_type=level, ratio_enabled=False, **{name: 1e-4}), OLD, BEHAVIOUR, MASK, SEGMENTS
        ).any()


def test_off_policy_mask_drops_distant_negative_sequences():
    # Means of behaviour - old: 0 and -0.05; swapped, 0 and 0.05.
    advantages = torch.tensor([-1.0, -1, 1, -1, -1, -1, -1, 1])
    assert not off_policy_mask(advantages, OLD, BEHAVIOUR, MASK, SEGMENTS, 0.01).any()
    found = off_policy_mask(advantages, BEHAVIOUR, OLD, MASK, SEGMENTS, 0.04)
    assert found.tolist() == [False] * 6 + [True, False]
    assert not off_policy_mask(advantages, BEHAVIOUR, OLD, MASK, SEGMENTS, 0.06).any()


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
        found = weigh(d, zeros, mask, segments, level=level, upper_bound=1e9)[mask]
        assert found.log().tolist() == pytest.approx([max(-20.0, min(20.0, x)) for x in logs], abs=1e-4)


TOKEN = st.tuples(st.booleans(), st.floats(-3, 3, width=32), st.sampled_from([-1.0, 0.0, 2.0]))


@given(
    st.lists(st.lists(TOKEN, min_size=1, max_size=8), min_size=1, max_size=5),
    st.sampled_from(["token", "segment", "geometric", "sequence", "max"]),
)
def test_bands_and_masks_agree_with_loops_over_tokens(sequences, level):
    """Masked and normalised weights, k2 and k3, and the off-policy mask. Values on a bound may fall on either side."""
    mask = torch.tensor([drawn for each in sequences for drawn, _, _ in each])
    d = torch.tensor([value for each in sequences for _, value, _ in each])
    advantages = torch.tensor([value for each in sequences for _, _, value in each])
    segments = torch.tensor([i for i, each in enumerate(sequences) for _ in each])
    zeros = torch.zeros_like(d)
    spans = []
    for each in sequences:
        run = []
        for at, (on, value, _) in enumerate([*each, (False, 0.0, 0.0)]):
            if on and (level != "token" or not run):
                run.append(value)
            if run and (level == "token" or (level == "segment" and not on) or at == len(each)):
                spans.append(run)
                run = []

    def over(span, f):
        values = [f(value) for value in span]
        return {"sequence": sum(values), "max": max(values)}.get(level, sum(values) / len(values))

    def clear(value, bound):
        return abs(value - bound) > 1e-4

    for name, f in (("k2_max", lambda x: x * x / 2), ("k3_max", lambda x: math.expm1(x) - x)):
        found = inside(
            CorrectionFilterConfig(agg_type=level, ratio_enabled=False, **{name: 0.5}), d, zeros, mask, segments
        )[mask].tolist()
        measured = [over(span, f) for span in spans for _ in span]
        assert [kept for kept, value in zip(found, measured, strict=True) if clear(value, 0.5)] == [
            value <= 0.5 for value in measured if clear(value, 0.5)
        ]
    if level != "max":
        given = {"level": level, "lower_bound": 0.5, "upper_bound": 2.0, "outside": "mask"}
        found = weigh(d, zeros, mask, segments, **given)
        ratios = [math.exp(over(span, float)) for span in spans]
        if all(clear(ratio, 0.5) and clear(ratio, 2.0) for ratio in ratios):
            weights = [ratio if 0.5 <= ratio <= 2 else 0.0 for ratio in ratios]
            expected = [weight for weight, span in zip(weights, spans, strict=True) for _ in span]
            assert found[mask].tolist() == pytest.approx(expected, rel=1e-4)
            mean = sum(weights) / len(weights) if any(weights) else 1.0
            normal = normalise_weights(found, mask, segments, level)[mask].tolist()
            assert normal == pytest.approx([value / mean for value in expected], rel=1e-4)
    if level == "geometric":
        means = [-over(span, float) for span in spans for _ in span]
        found = off_policy_mask(advantages, d, zeros, mask, segments, 0.25)
        assert not found[~mask].any()
        for hit, mean, advantage in zip(found[mask].tolist(), means, advantages[mask].tolist(), strict=True):
            assert not clear(mean, 0.25) or hit == (mean > 0.25 and advantage < 0)
