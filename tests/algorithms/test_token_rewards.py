"""Scores onto tokens, and the masks that leave sequences out."""

from __future__ import annotations

import math

import pytest
import torch

from roll_core.algorithms.rewards import (
    difficulty_mask,
    error_max_len_clip,
    max_len_mask,
    soft_overlong_penalty,
    token_rewards,
)
from roll_core.errors import NonFiniteError
from roll_core.spec.algorithms import AdvantageInput
from roll_testing.errors import raises_error


def flat(*rows):
    return torch.tensor([value for row in rows for value in row])


MASK = flat([0, 1, 1], [1, 0, 1, 0], [0, 0]).bool()
SEGMENTS = flat([0] * 3, [1] * 4, [2] * 2)


def batch(scores, mask=MASK, segments=SEGMENTS, **given):
    groups = torch.zeros(len(scores), dtype=torch.int64)
    return AdvantageInput(scores_S=scores, mask_T=mask, segments_T=segments, groups_S=groups, **given)


def test_a_score_stands_at_the_last_masked_token():
    out = token_rewards(batch(torch.tensor([2.0, -3.0, 7.0])))
    assert out.tolist() == [0, 0, 2, 0, 0, -3, 0, 0, 0]


def test_the_kl_penalty_stands_at_each_masked_token():
    # coefficient 0.5: -0.5*kl, and at the last masked token added to the score
    kl = torch.tensor([math.nan, 1.0, 2.0, 3.0, math.nan, 4.0, 0.0, 0.0, 0.0])
    out = token_rewards(batch(torch.tensor([2.0, -3.0, 7.0]), kl_T=kl, kl_coef=0.5))
    assert out.tolist() == [0, -0.5, 1.0, -1.5, 0, -5.0, 0, 0, 0]


def test_token_rewards_are_clipped_after_the_penalty():
    kl = torch.full((9,), 8.0)
    out = token_rewards(batch(torch.tensor([6.0, -3.0, 0.0]), kl_T=kl, kl_coef=0.5, reward_clip=1.5))
    assert out.tolist() == [0, -1.5, 1.5, -1.5, 0, -1.5, 0, 0, 0]


def test_no_sequences_are_no_error():
    none = torch.tensor([])
    assert token_rewards(batch(none, none.bool(), none.long())).shape == (0,)


def test_the_input_is_not_modified():
    scores = torch.tensor([2.0, -3.0, 7.0])
    token_rewards(batch(scores, kl_T=torch.ones(9), kl_coef=1.0))
    assert scores.tolist() == [2.0, -3.0, 7.0]


def test_scores_and_penalties_that_are_not_finite_are_an_error():
    with raises_error(NonFiniteError, "scores"):
        token_rewards(batch(torch.tensor([math.nan, 0.0, 0.0])))
    with raises_error(NonFiniteError, "KL"):
        token_rewards(batch(torch.zeros(3), kl_T=torch.full((9,), math.inf), kl_coef=0.1))


def test_the_soft_penalty_grows_from_the_cache_to_the_limit():
    # L_max 10, L_cache 4: none up to 6 tokens, (6 - 7) / 4, (6 - 9) / 4, all from 10 tokens on.
    lengths = torch.tensor([1, 6, 7, 9, 10, 30])
    found = soft_overlong_penalty(lengths, max_length=10, cache_length=4, factor=2.0)
    assert found.tolist() == pytest.approx([0, 0, -0.5, -1.5, -2, -2])


def test_answers_cut_at_the_limit_are_masked():
    assert max_len_mask(["stop", "length", "abort"]).tolist() == [True, False, True]


def test_hopeless_and_solved_groups_are_masked():
    # group 5: mean 0; group 3: mean 1; group 8: mean 0.5
    scores, groups = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 1.0]), torch.tensor([5, 3, 5, 8, 3, 8])
    assert difficulty_mask(scores, groups).tolist() == [False, False, False, True, False, True]
    assert difficulty_mask(scores, groups, low=-1, high=0.5).tolist() == [True, False, True, False, False, False]


def test_long_wrong_answers_are_masked():
    scores, lengths = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([9, 9, 3, 3])
    assert error_max_len_clip(scores, lengths, threshold=9, correct=1.0).tolist() == [True, False, True, True]
