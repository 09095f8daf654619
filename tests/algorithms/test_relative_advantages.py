"""Estimators that compare a rollout with its group, against numbers worked out by hand and against loops."""

from __future__ import annotations

import math
import random
import statistics
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.algorithms.advantages import (
    gae,
    gdpo,
    grpo,
    max_rl,
    opo,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from roll_core.errors import NonFiniteError, UnsupportedError
from roll_core.spec.algorithms import AdvantageInput
from roll_testing.errors import raises_error


def batch_of(scores, *, groups=None, lengths=None, kl=None, components=None, **given):
    """One prompt token and `lengths` response tokens for each score. `kl` has a value for each response token."""
    lengths = lengths or [1] * len(scores)
    mask = [bool(t) for length in lengths for t in range(length + 1)]
    if kl is not None:
        given |= {"kl_T": torch.tensor([v for row in kl for v in (9.0, *row)]), "kl_coef": 1.0}
    return AdvantageInput(
        scores_S=torch.tensor(scores, dtype=torch.float32),
        groups_S=torch.tensor(groups or [0] * len(scores), dtype=torch.int64),
        mask_T=torch.tensor(mask, dtype=torch.bool),
        segments_T=torch.tensor([s for s, length in enumerate(lengths) for _ in range(length + 1)], dtype=torch.int64),
        components_S={name: torch.tensor(each) for name, each in (components or {}).items()},
        **given,
    )


def per_rollout(estimate, batch):
    """The advantage of each rollout's last token; checks that unmasked tokens have none."""
    found = estimate(batch).advantages_T
    assert not found[~batch.mask_T].any()
    return [found[batch.mask_T & (batch.segments_T == s)][-1].item() for s in range(batch.scores_S.numel())]


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_reinforce_plus_plus_whitens_returns_over_tokens():
    # Returns with a KL of 0.5 at each token: rollout 0 (reward 2): 1.0, 1.5; rollout 1 (reward 0): -0.5.
    # Mean 2/3; squares 1/9 + 25/36 + 49/36 = 78/36, variance 39/36.
    batch = batch_of([2.0, 0.0], lengths=[2, 1], kl=[[0.5, 0.5], [0.5]])
    out = reinforce_plus_plus(batch)
    std = math.sqrt(39 / 36)
    expected = [0, (1 - 2 / 3) / std, (1.5 - 2 / 3) / std, 0, (-0.5 - 2 / 3) / std]
    assert out.advantages_T.tolist() == pytest.approx(expected, abs=1e-6)
    assert out.returns_T.tolist() == pytest.approx([0, 1.0, 1.5, 0, -0.5])


def test_reinforce_pp_baseline_subtracts_group_mean_then_whitens():
    # Groups (1, 0) and (5, 5): -+0.5 and 0. Tokens: 0.5, 0.5, -0.5, 0, 0; mean 0.1, squares 0.16*2 + 0.36 + 0.01*2.
    batch = batch_of([1.0, 0.0, 5.0, 5.0], groups=[3, 3, 4, 4], lengths=[2, 1, 1, 1])
    std = math.sqrt(0.70 / 4)
    expected = [0.4 / std, -0.6 / std, -0.1 / std, -0.1 / std]
    assert per_rollout(reinforce_plus_plus_baseline, batch) == pytest.approx(expected, abs=1e-6)


def test_remax_subtracts_the_reward_of_the_greedy_response():
    # Rewards 1, 0 and 3; their prompts' greedy responses have 0.5, 0.5 and 3.
    batch = batch_of([1.0, 0.0, 3.0], groups=[0, 0, 1], lengths=[2, 1, 1], baselines_S=torch.tensor([0.5, 0.5, 3.0]))
    assert remax(batch).advantages_T.tolist() == pytest.approx([0, 0.5, 0.5, 0, -0.5, 0, 0])
    # With a KL of 0.1 and 0.2: 0.5 - 0.3 and 0.5 - 0.2.
    batch = batch_of([1.0], lengths=[2], kl=[[0.1, 0.2]], baselines_S=torch.tensor([0.5]))
    assert remax(batch).advantages_T.tolist() == pytest.approx([0, 0.2, 0.3])


def test_remax_needs_finite_rewards_of_greedy_responses():
    with raises_error(UnsupportedError, "remax", "adv_estimator"):
        remax(batch_of([1.0, 0.0]))
    with raises_error(NonFiniteError, "nan"):
        remax(batch_of([1.0, 0.0], baselines_S=torch.tensor([1.0, math.nan])))


def test_grpo_leaves_the_sample_itself_out():
    # 0, 1, 3: others of 0 are 1, 3 (mean 2, std sqrt 2); of 1: 0, 3 (1.5, 3/sqrt 2); of 3: 0, 1 (0.5, 1/sqrt 2).
    root = math.sqrt(2)
    batch = batch_of([0.0, 1.0, 3.0], options={"leave_one_out": True})
    assert per_rollout(grpo, batch) == pytest.approx([-2 / root, -0.5 * root / 3, 2.5 * root], abs=1e-4)
    # The others are equal: no division. A group of two has no deviation either.
    batch = batch_of([1.0, 0.0, 0.0, 4.0, 1.0], groups=[0, 0, 0, 1, 1], options={"leave_one_out": True})
    root = math.sqrt(0.5)
    assert per_rollout(grpo, batch) == pytest.approx([1, -0.5 / root, -0.5 / root, 3, -3], abs=1e-4)


def test_opo_weighs_its_baseline_by_length():
    # (3 * 1 + 1 * 0) / 4 = 0.75
    batch = batch_of([1.0, 0.0], lengths=[3, 1])
    assert per_rollout(opo, batch) == pytest.approx([0.25, -0.75])


def test_max_rl_divides_by_the_mean():
    # 1, 0, 0, 0: mean 0.25: 0.75 / 0.25 = 3; -1. A group that solved nothing has no signal.
    batch = batch_of([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], groups=[0, 0, 0, 0, 1, 1])
    assert per_rollout(max_rl, batch) == pytest.approx([3, -1, -1, -1, 0, 0])


def test_max_rl_refuses_negative_rewards():
    with raises_error(UnsupportedError, "-1"):
        max_rl(batch_of([1.0, -1.0]))


def test_pass_at_k_by_hand():
    # 1, 0, 0 and k = 2: subsets {1,0}, {1,0}, {0,0}: mean 2/3, variance 2/9. Subsets with the 1: 1; with a 0: 1/2.
    std = math.sqrt(2 / 9)
    batch = batch_of([0.0, 1.0, 0.0], options={"k": 2})
    expected = [(0.5 - 2 / 3) / std, (1 / 3) / std, (0.5 - 2 / 3) / std]
    assert per_rollout(pass_at_k, batch) == pytest.approx(expected, abs=1e-5)


def test_pass_at_k_of_binary_rewards_equals_the_closed_form():
    # arXiv:2508.10751 §3.3, with `wrong` of `n` responses: mean 1 - C(wrong, k) / C(n, k), variance mean (1 - mean).
    n, k, wrong = 6, 3, 4
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    right_one, wrong_one = (1 - mean) / std, (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / std
    batch = batch_of([1.0, 0.0, 0.0, 1.0, 0.0, 0.0], options={"k": k})
    expected = [right_one, wrong_one, wrong_one, right_one, wrong_one, wrong_one]
    assert per_rollout(pass_at_k, batch) == pytest.approx(expected, rel=1e-5)


def test_pass_at_1_equals_grpo_with_biased_deviation():
    batch = batch_of([0.0, 1.0, 3.0], options={"k": 1})
    mean, std = 4 / 3, statistics.pstdev([0.0, 1.0, 3.0])
    assert per_rollout(pass_at_k, batch) == pytest.approx([(r - mean) / std for r in (0, 1, 3)], abs=1e-5)


def test_pass_at_group_size_credits_the_best_by_its_lead():
    options = {"k": 3, "baseline": "leave_one_out"}
    assert per_rollout(pass_at_k, batch_of([0.2, 1.0, 0.7], options=options)) == pytest.approx([0, 0.3, 0], abs=1e-6)
    assert per_rollout(pass_at_k, batch_of([1.0, 1.0, 0.0], options=options)) == [0, 0, 0]


def test_pass_at_k_gives_no_signal_to_groups_that_are_too_small():
    batch = batch_of([1.0, 0.0, 1.0, 0.0, 0.0], groups=[0, 0, 1, 1, 1], options={"k": 2})
    assert per_rollout(pass_at_k, batch)[:2] == [0, 0]
    assert per_rollout(pass_at_k, batch)[2] > 0


def test_gdpo_normalises_components_before_it_weighs_them():
    # accuracy 1, 0 -> -+1/sqrt 2; format 0, 10 -> the other way round; weights 1 and 0.5: -+ 0.5/sqrt 2.
    components = {"accuracy": [1.0, 0.0], "format": [0.0, 10.0]}
    given = {"weights": {"accuracy": 1.0, "format": 0.5}}
    batch = batch_of([7.0, 7.0], components=components, options=given | {"batch_norm": False})
    half = 0.5 / math.sqrt(2)
    assert per_rollout(gdpo, batch) == pytest.approx([half, -half], abs=1e-5)
    # Over the batch: mean 0, unbiased deviation 0.5.
    batch = batch_of([7.0, 7.0], components=components, options=given)
    assert per_rollout(gdpo, batch) == pytest.approx([half / 0.5, -half / 0.5], abs=1e-5)


def test_gdpo_ignores_rollouts_without_a_component():
    components = {"accuracy": [1.0, 0.0, math.nan, 3.0]}
    options = {"weights": {"accuracy": 1.0}, "batch_norm": False}
    batch = batch_of([0.0] * 4, groups=[0, 0, 0, 1], components=components, options=options)
    half = math.sqrt(0.5)
    assert per_rollout(gdpo, batch) == pytest.approx([half, -half, 0, 0], abs=1e-5)


def test_gdpo_names_a_component_that_no_reward_has():
    with raises_error(UnsupportedError, "speed", "accuracy"):
        gdpo(batch_of([1.0], components={"accuracy": [1.0]}, options={"weights": {"speed": 1.0}}))


def test_a_critic_may_have_its_own_lambda():
    # Rewards 0, 1, values 0, gamma 1: deltas 0, 1. The policy's lambda 0.5: 0.5, 1; the critic's lambda 1: 1, 1.
    batch = batch_of([1.0], lengths=[2], values_T=torch.zeros(3), lambd=0.5, critic_lambd=1.0)
    out = gae(batch)
    assert out.advantages_T.tolist() == [0, 0.5, 1]
    assert out.returns_T.tolist() == [0, 1, 1]


def test_the_epsilons_are_those_of_the_config():
    batch = batch_of([1.0, 0.0], norm_epsilon=0.5)  # deviation sqrt 0.5
    assert per_rollout(grpo, batch)[0] == pytest.approx(0.5 / (math.sqrt(0.5) + 0.5))
    batch = batch_of([1.0, 0.0], norm_epsilon=0.8)  # the deviation does not count
    assert per_rollout(grpo, batch)[0] == 0.5
    batch = batch_of([1.0, 0.0], whiten_epsilon=0.5)  # variance 0.5
    assert per_rollout(reinforce_plus_plus, batch)[0] == pytest.approx(0.5)


# -- hard cases --------------------------------------------------------------------------------------------------------

OPTIONS = {
    gdpo: {"weights": {"part": 1.0}},
    pass_at_k: {"k": 2},
}
ESTIMATORS = [reinforce_plus_plus, reinforce_plus_plus_baseline, opo, max_rl, pass_at_k, gdpo]
RELATIVE = [opo, max_rl, pass_at_k, gdpo, grpo]


def batch_for(estimate, scores, **given):
    return batch_of(scores, components={"part": scores}, options=OPTIONS.get(estimate, {}), **given)


@pytest.mark.parametrize("estimate", RELATIVE)
def test_equal_rewards_and_groups_of_one_have_no_advantage(estimate):
    scores, groups = [0.1, 0.1, 0.1, 0.7], [5, 5, 5, 2]
    assert per_rollout(estimate, batch_for(estimate, scores, groups=groups, lengths=[1, 2, 3, 4])) == [0.0] * 4


@pytest.mark.parametrize("estimate", [*RELATIVE, reinforce_plus_plus_baseline])
def test_groups_are_apart_and_in_any_order(estimate):
    scores, groups, lengths = [1.0, 0.0, 3.0, 0.0, 0.5], [8, 1, 1, 8, 8], [2, 1, 3, 2, 1]
    order = [3, 2, 0, 4, 1]
    one = per_rollout(estimate, batch_for(estimate, scores, groups=groups, lengths=lengths))
    other = per_rollout(
        estimate,
        batch_for(
            estimate, [scores[i] for i in order], groups=[groups[i] for i in order], lengths=[lengths[i] for i in order]
        ),
    )
    assert other == pytest.approx([one[i] for i in order], abs=1e-6)


@pytest.mark.parametrize("estimate", RELATIVE)
def test_the_kl_of_later_tokens_is_subtracted_from_each_token(estimate):
    given = {"groups": [0, 0, 0], "lengths": [2, 1, 1]}
    plain = per_rollout(estimate, batch_for(estimate, [1.0, 0.0, 0.0], **given))
    batch = batch_for(estimate, [1.0, 0.0, 0.0], kl=[[0.1, 0.2], [0.0], [0.0]], **given)
    found = estimate(batch).advantages_T.tolist()
    assert found[1:3] == pytest.approx([plain[0] - 0.3, plain[0] - 0.2], abs=1e-6)


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_an_empty_batch_is_no_error(estimate):
    assert estimate(batch_for(estimate, [])).advantages_T.shape == (0,)


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_rewards_that_are_not_finite_are_an_error(estimate):
    with pytest.raises(NonFiniteError):
        estimate(batch_for(estimate, [math.inf, 0.0]))


# -- against loops -----------------------------------------------------------------------------------------------------


def loop_relative(estimate, scores, groups, lengths):
    out = []
    for i, score in enumerate(scores):
        members = [j for j in range(len(scores)) if groups[j] == groups[i]]
        mean = statistics.fmean(scores[j] for j in members)
        if estimate is opo:
            tokens = sum(lengths[j] for j in members)
            out.append(score - sum(lengths[j] * scores[j] for j in members) / tokens)
        elif estimate is max_rl:
            out.append((score - mean) / mean if mean > 1e-6 else 0.0)
        else:
            out.append(score - mean)
    return out


def loop_pass_at_k(scores, groups, k, leave_one_out):
    """Over all subsets, without binomial coefficients."""
    out = []
    for i in range(len(scores)):
        members = [j for j in range(len(scores)) if groups[j] == groups[i]]
        everywhere = [max(scores[j] for j in subset) for subset in combinations(members, k)]
        mine = [subset for subset in combinations(members, k) if i in subset]
        if not mine or (len(members) == k and not leave_one_out):
            out.append(0.0)
        elif leave_one_out:
            out.append(
                statistics.fmean(
                    max(scores[j] for j in subset) - max(scores[j] for j in subset if j != i) for subset in mine
                )
            )
        else:
            gap = statistics.fmean(max(scores[j] for j in subset) for subset in mine) - statistics.fmean(everywhere)
            std = statistics.pstdev(everywhere)
            out.append(gap / (std + 1e-6) if std > 1e-6 else gap)
    return out


@st.composite
def ragged(draw):
    rng = random.Random(draw(st.integers(0, 2**32)))
    number = draw(st.integers(1, 9))
    scores = [rng.choice([0.0, 0.25, 0.5, 1.0]) for _ in range(number)]
    return scores, [rng.randrange(3) for _ in range(number)], [rng.randrange(1, 5) for _ in range(number)]


@settings(max_examples=40)
@given(ragged())
def test_baselines_equal_their_loops(rows):
    scores, groups, lengths = rows
    batch = batch_of(scores, groups=groups, lengths=lengths)
    for estimate in (opo, max_rl):
        assert per_rollout(estimate, batch) == pytest.approx(loop_relative(estimate, *rows), abs=1e-5)
    centred = loop_relative(reinforce_plus_plus_baseline, *rows)
    tokens = [value for value, length in zip(centred, lengths, strict=True) for _ in range(length)]
    std = math.sqrt(statistics.variance(tokens) + 1e-8) if len(tokens) > 1 else math.inf
    expected = [(value - statistics.fmean(tokens)) / std for value in centred]
    assert per_rollout(reinforce_plus_plus_baseline, batch) == pytest.approx(expected, abs=1e-4)


@settings(max_examples=40)
@given(ragged(), st.integers(1, 5), st.booleans())
def test_pass_at_k_equals_a_loop_over_subsets(rows, k, leave_one_out):
    scores, groups, lengths = rows
    k = max(k, 2) if leave_one_out else k
    options = {"k": k, "baseline": "leave_one_out" if leave_one_out else "mean"}
    batch = batch_of(scores, groups=groups, lengths=lengths, options=options)
    assert per_rollout(pass_at_k, batch) == pytest.approx(loop_pass_at_k(scores, groups, k, leave_one_out), abs=1e-4)


@settings(max_examples=40)
@given(ragged())
def test_leave_one_out_equals_a_loop_over_the_others(rows):
    scores, groups, lengths = rows
    expected = []
    for i, score in enumerate(scores):
        others = [scores[j] for j in range(len(scores)) if j != i and groups[j] == groups[i]]
        std = statistics.stdev(others) if len(others) > 1 else 0.0
        gap = score - statistics.fmean(others) if others else 0.0
        expected.append(gap / (std + 1e-6) if std > 1e-6 else gap)
    batch = batch_of(scores, groups=groups, lengths=lengths, options={"leave_one_out": True})
    assert per_rollout(grpo, batch) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("number", [3, 9, 14, 33])
@pytest.mark.parametrize("reward", [101.0, 123.4, 255.0, 1000.0, 1e7])
def test_equal_rewards_of_the_others_do_not_divide(number, reward):
    # The others of the first have the mean `reward` and no deviation. Those of the rest have both rewards.
    batch = batch_of([0.0] + [reward] * (number - 1), options={"leave_one_out": True})
    first, *rest = per_rollout(grpo, batch)
    assert first == pytest.approx(-reward)
    others = [0.0] + [float(batch.scores_S[1])] * (number - 2)
    expected = (others[1] - statistics.fmean(others)) / (statistics.stdev(others) + 1e-6) if number > 3 else 2**-0.5
    assert rest == pytest.approx([expected] * (number - 1), rel=1e-5)


@pytest.mark.parametrize("estimate", [grpo, opo, max_rl, rloo, gdpo, pass_at_k, reinforce_plus_plus_baseline])
@pytest.mark.parametrize("reward", [0.1, 123.4, 1e9])
def test_equal_rewards_give_exactly_no_advantage(estimate, reward):
    options = {pass_at_k: {"k": 2}, gdpo: {"weights": {"a": 0.7}}}.get(estimate, {})
    given = {"components": {"a": [reward] * 11}} if estimate is gdpo else {}
    batch = batch_of([reward] * 11, lengths=list(range(1, 12)), options=options, **given)
    assert per_rollout(estimate, batch) == [0.0] * 11


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_max_rl_does_not_depend_on_the_unit_of_rewards(unit):
    batch = batch_of([unit, 0.0, 0.0, 0.0])
    assert per_rollout(max_rl, batch) == pytest.approx([3, -1, -1, -1], rel=1e-6)
