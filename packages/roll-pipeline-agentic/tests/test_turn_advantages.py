"""Estimators that credit turns, against numbers worked out by hand and against loops over turns and tokens."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.errors import NonFiniteError, UnsupportedError
from roll_core.spec.algorithms import AdvantageInput, RolloutTurns
from roll_pipeline_agentic.turn_advantages import agentic_reinforce, gigpo, step_reinforce, turn_gae
from roll_testing.errors import raises_error

ESTIMATORS = [step_reinforce, agentic_reinforce, gigpo, turn_gae]


def batch_of(rollouts, *, groups=None, values=None, kl=None, **given):
    """Each rollout is a list of turns `(reward, state, generated tokens)`. Each turn begins with one token of the
    environment. `values` and `kl` are functions of the turn's index and the token's index in it."""
    turns = [(s, turn) for s, rollout in enumerate(rollouts) for turn in rollout]
    layout = [(s, u, t) for u, (s, turn) in enumerate(turns) for t in range(-1, turn[2])]

    def flat(f):
        return torch.tensor([9.0 if t < 0 else f(u, t) for _, u, t in layout], dtype=torch.float32)

    if kl is not None:
        given |= {"kl_T": flat(kl), "kl_coef": 1.0}
    return AdvantageInput(
        scores_S=torch.tensor([float(sum(turn[0] for turn in each)) for each in rollouts]),
        groups_S=torch.tensor(groups or [0] * len(rollouts), dtype=torch.int64),
        mask_T=torch.tensor([t >= 0 for _, _, t in layout], dtype=torch.bool),
        segments_T=torch.tensor([s for s, _, _ in layout], dtype=torch.int64),
        values_T=None if values is None else flat(values),
        turns=RolloutTurns(
            index_T=torch.tensor([u for _, u, _ in layout], dtype=torch.int64),
            rollouts_U=torch.tensor([s for s, _ in turns], dtype=torch.int64),
            rewards_U=torch.tensor([turn[0] for _, turn in turns], dtype=torch.float32),
            states_U=torch.tensor([turn[1] for _, turn in turns], dtype=torch.int64),
        ),
        **given,
    )


def per_turn(batch, flat_T):
    """The value of each turn's tokens, None for a turn without tokens; checks that they are equal, and 0 elsewhere."""
    assert not flat_T[~batch.mask_T].any()
    found = []
    for u in range(batch.turns.rewards_U.numel()):
        values = flat_T[batch.mask_T & (batch.turns.index_T == u)].unique()
        assert values.numel() <= 1
        found.append(values.item() if values.numel() else None)
    return found


# -- by hand -----------------------------------------------------------------------------------------------------------

TWO = [[(0.0, 1, 2), (1.0, 2, 1)], [(0.0, 1, 1), (0.0, 3, 3)]]


def test_step_reinforce_discounts_by_turn():
    # 0.5 * 1, 1; 0, 0
    batch = batch_of(TWO, options={"step_reward_gamma": 0.5})
    assert per_turn(batch, step_reinforce(batch).advantages_T) == [0.5, 1, 0, 0]


@pytest.mark.parametrize(
    ("groups", "options", "expected"),
    [
        ([0, 1], {"method": "mean", "grouping": "batch"}, [0.125, 0.625, -0.375, -0.375]),
        ([0, 1], {"method": "mean", "grouping": "group"}, [-0.25, 0.25, 0, 0]),
        ([0, 0], {"method": "mean", "grouping": "state"}, [0.25, 0, -0.25, 0]),
        ([0, 1], {"method": "mean", "grouping": "state"}, [0, 0, 0, 0]),
        ([0, 0], {"method": "mean_std", "grouping": "state"}, [0.5**0.5, 0, -(0.5**0.5), 0]),
    ],
)
def test_step_reinforce_compares_the_turns_of_its_grouping(groups, options, expected):
    batch = batch_of(TWO, groups=groups, options=options | {"step_reward_gamma": 0.5})
    assert per_turn(batch, step_reinforce(batch).advantages_T) == pytest.approx(expected, abs=1e-5)


def test_agentic_reinforce_discounts_by_gamma_with_the_turns_kl():
    # KL 0.1 per token: turn rewards -0.2, 0.9; -0.1, -0.3; gamma 0.5.
    batch = batch_of(TWO, gamma=0.5, kl=lambda u, t: 0.1)
    out = agentic_reinforce(batch)
    assert per_turn(batch, out.advantages_T) == pytest.approx([-0.2 + 0.45, 0.9, -0.1 - 0.15, -0.3], abs=1e-6)
    assert torch.equal(out.returns_T, out.advantages_T)


def test_gigpo_adds_advantages_of_episode_and_state():
    # Episodes 1 and 0: -+0.5. State 1: returns 0.5 and 0: -+0.25. States 2 and 3 occur once.
    batch = batch_of(TWO, options={"step_reward_gamma": 0.5})
    assert per_turn(batch, gigpo(batch).advantages_T) == pytest.approx([0.75, 0.5, -0.75, -0.5])
    weighed = {"step_reward_gamma": 0.5, "episode_reward_weight": 2.0, "step_reward_weight": 0.0}
    batch = replace(batch, options=weighed)
    assert per_turn(batch, gigpo(batch).advantages_T) == pytest.approx([1, 1, -1, -1])
    batch = replace(batch, options={"step_reward_gamma": 0.5, "mode": "mean_std_norm"})
    root = math.sqrt(0.5)
    assert per_turn(batch, gigpo(batch).advantages_T) == pytest.approx([2 * root, root, -2 * root, -root], abs=1e-5)


def test_gigpo_counts_a_long_episode_once():
    long = [[(0.0, 1, 1), (0.0, 2, 1), (3.0, 3, 1)], [(1.0, 4, 1)]]
    batch = batch_of(long, options={"step_reward_weight": 0.0})
    assert per_turn(batch, gigpo(batch).advantages_T) == [1, 1, 1, -1]


def test_gigpo_never_compares_states_of_different_prompts():
    batch = batch_of([[(1.0, 7, 1)], [(0.0, 7, 1)]], groups=[0, 1])
    assert per_turn(batch, gigpo(batch).advantages_T) == [0, 0]


def test_turn_gae_by_hand():
    # gamma 1, lambda 0.5, values before the turns 0.2 and 0.6, rewards 0 and 1:
    # delta_2 = 1 - 0.6 = 0.4; delta_1 = 0 + 0.6 - 0.2 = 0.4; A_2 = 0.4, A_1 = 0.4 + 0.5 * 0.4 = 0.6.
    values = {0: 0.2, 1: 0.6}
    batch = batch_of([TWO[0]], lambd=0.5, values=lambda u, t: values[u] if t == 0 else 77.0)
    out = turn_gae(batch)
    assert per_turn(batch, out.advantages_T) == pytest.approx([0.6, 0.4])
    assert per_turn(batch, out.returns_T) == pytest.approx([0.8, 1.0])
    out = turn_gae(replace(batch, critic_lambd=1.0))
    assert per_turn(batch, out.advantages_T) == pytest.approx([0.6, 0.4])
    assert per_turn(batch, out.returns_T) == pytest.approx([1.0, 1.0])


def test_turn_gae_moves_rewards_of_empty_turns_back():
    rollouts = [[(5.0, 1, 0), (0.0, 2, 1), (1.0, 3, 0)], [(2.0, 1, 1)]]
    batch = batch_of(rollouts, values=lambda u, t: 0.0)
    assert per_turn(batch, turn_gae(batch).advantages_T) == [None, 1.0, None, 2.0]


# -- hard cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_a_batch_without_turns_is_refused(estimate):
    with raises_error(UnsupportedError, estimate.__name__):
        estimate(replace(batch_of(TWO, values=lambda u, t: 0.0), turns=None))


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_whitened_token_rewards_are_refused(estimate):
    with raises_error(UnsupportedError, "whiten_rewards"):
        estimate(batch_of(TWO, values=lambda u, t: 0.0, whiten_rewards=True))


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_no_rollout_and_no_token_are_no_error(estimate):
    assert estimate(batch_of([], values=lambda u, t: 0.0)).advantages_T.shape == (0,)
    found = estimate(batch_of([[(1.0, 1, 0)]], values=lambda u, t: 0.0)).advantages_T
    assert found.tolist() == [0]


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_turn_rewards_that_are_not_finite_are_an_error(estimate):
    with pytest.raises(NonFiniteError):
        estimate(batch_of([[(math.nan, 1, 1)]], values=lambda u, t: 0.0))


def test_states_and_values_are_asked_for_where_they_are_read():
    batch = batch_of(TWO)
    stateless = replace(batch, turns=replace(batch.turns, states_U=None))
    with raises_error(UnsupportedError, "state"):
        gigpo(stateless)
    with raises_error(UnsupportedError, "state"):
        step_reinforce(replace(stateless, options={"method": "mean", "grouping": "state"}))
    with raises_error(UnsupportedError, "critic"):
        turn_gae(batch)


@pytest.mark.parametrize("estimate", [step_reinforce, gigpo])
def test_the_kl_of_later_tokens_is_subtracted_from_each_token(estimate):
    plain = estimate(batch_of(TWO)).advantages_T
    charged = estimate(batch_of(TWO, kl=lambda u, t: 0.1)).advantages_T
    # Two and one generated tokens, then one and three: what is still to come, itself included.
    assert (plain - charged).tolist() == pytest.approx([0, 0.3, 0.2, 0, 0.1, 0, 0.4, 0, 0.3, 0.2, 0.1], abs=1e-6)


# -- against loops -----------------------------------------------------------------------------------------------------


@st.composite
def ragged(draw):
    rng = random.Random(draw(st.integers(0, 2**32)))
    rollouts = [
        [(rng.choice([0.0, 0.5, 1.0]), rng.randrange(3), rng.randrange(4)) for _ in range(rng.randrange(1, 5))]
        for _ in range(draw(st.integers(1, 6)))
    ]
    return rollouts, [rng.randrange(2) for _ in rollouts], rng


def returns_to_go(rewards, gamma):
    found, ahead = [], 0.0
    for reward in reversed(rewards):
        ahead = reward + gamma * ahead
        found.append(ahead)
    return found[::-1]


@settings(max_examples=40)
@given(ragged())
def test_gigpo_equals_a_loop_over_turns(rows):
    rollouts, groups, _ = rows
    returns = [returns_to_go([turn[0] for turn in each], 0.95) for each in rollouts]
    totals = [sum(turn[0] for turn in each) for each in rollouts]
    expected = []
    for s, rollout in enumerate(rollouts):
        members = [i for i, group in enumerate(groups) if group == groups[s]]
        episode = totals[s] - statistics.fmean(totals[i] for i in members)
        for k, (_, state, tokens) in enumerate(rollout):
            alike = [returns[i][j] for i in members for j, turn in enumerate(rollouts[i]) if turn[1] == state]
            expected.append(episode + returns[s][k] - statistics.fmean(alike) if tokens else None)
    batch = batch_of(rollouts, groups=groups)
    for found, wanted in zip(per_turn(batch, gigpo(batch).advantages_T), expected, strict=True):
        assert found == (None if wanted is None else pytest.approx(wanted, abs=1e-5))


@settings(max_examples=40)
@given(ragged(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.3, 1.0]))
def test_turn_gae_equals_a_loop_over_turns(rows, gamma, lambd):
    rollouts, _, rng = rows
    values = [round(rng.random(), 3) for each in rollouts for _ in each]
    batch = batch_of(rollouts, gamma=gamma, lambd=lambd, values=lambda u, t: values[u] - t)
    out = turn_gae(batch)
    expected, u = [], 0
    for rollout in rollouts:
        kept, earned = [], []
        for k, (reward, _, tokens) in enumerate(rollout):
            if tokens:
                kept.append(u + k)
                earned.append(reward)
            elif kept:
                earned[-1] += reward
        ahead, following, found = 0.0, 0.0, {}
        for turn, reward in zip(reversed(kept), reversed(earned), strict=True):
            ahead = reward + gamma * following - values[turn] + gamma * lambd * ahead
            following = values[turn]
            found[turn] = ahead
        expected += [found.get(u + k) for k in range(len(rollout))]
        u += len(rollout)
    for turn, (advantage, target) in enumerate(
        zip(per_turn(batch, out.advantages_T), per_turn(batch, out.returns_T), strict=True)
    ):
        wanted = expected[turn]
        assert advantage == (None if wanted is None else pytest.approx(wanted, abs=1e-5))
        assert target == (None if wanted is None else pytest.approx(wanted + values[turn], abs=1e-5))
