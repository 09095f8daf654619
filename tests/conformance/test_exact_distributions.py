"""What the kit for engines takes for right: exact probabilities, and a test of sampled that seldom errs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roll_core.types import SamplingParams
from roll_testing.errors import raises_error
from roll_testing.infer.exact import BINS, FALSE_ALARM, SampledTokens, clear, probabilities

ROWS = np.random.default_rng(4).normal(0, 2, (50, 40))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.3),
        SamplingParams(temperature=1.5, top_k=12, top_p=0.8, min_p=0.2),
    ],
    ids=lambda params: f"{params.temperature},{params.top_k},{params.top_p},{params.min_p}",
)
def test_probabilities_are_those_of_the_warpers_of_transformers(params):
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    scores = TemperatureLogitsWarper(params.temperature)(None, torch.from_numpy(ROWS))
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    expected = torch.softmax(scores, -1).numpy()
    judged = clear(ROWS, params)
    assert judged.mean() > 0.8
    np.testing.assert_allclose(probabilities(ROWS, params)[judged], expected[judged], atol=1e-12)


def test_the_token_that_reaches_top_p_is_kept():
    row = np.log(np.array([[0.2, 0.5, 0.3]]))
    np.testing.assert_allclose(probabilities(row, SamplingParams(top_p=0.6)), [[0, 0.625, 0.375]])


def test_rounding_decides_at_a_limit():
    row = np.log(np.array([[0.5, 0.25, 0.25]]))
    assert not clear(row, SamplingParams(top_p=0.75))[0]
    assert not clear(row, SamplingParams(min_p=0.5))[0]
    assert not clear(row, SamplingParams(top_k=2))[0]
    assert clear(row, SamplingParams(top_p=0.6, min_p=0.4, top_k=1))[0]


def drawn(params, seed, rows, wrong=None):
    """Tokens of the rows, drawn by numpy; from those of `wrong` parameters, if given."""
    random = np.random.default_rng(seed)
    return np.array([random.choice(rows.shape[1], p=each) for each in probabilities(rows, wrong or params)])


def test_correct_samples_have_the_chi_square_statistic():
    params, statistics = SamplingParams(temperature=0.8), []
    for seed in range(60):
        sampled = SampledTokens(params)
        sampled.add(np.tile(ROWS, (8, 1)), drawn(params, seed, np.tile(ROWS, (8, 1))))
        statistics.append(sampled.statistic())
        sampled.check()
    # Of 60 variables with mean 19 and variance 38 the mean lies within 3.2 in all but one of 20,000 cases.
    assert abs(np.mean(statistics) - (BINS - 1)) < 3.2


def test_wrong_samples_are_less_likely_than_the_false_alarm():
    rows, params = np.tile(ROWS, (24, 1)), SamplingParams(temperature=0.8)
    sampled = SampledTokens(params)
    sampled.add(rows, drawn(params, 1, rows, wrong=SamplingParams(temperature=1.0)))
    with raises_error(AssertionError, "1200"):
        sampled.check()
    assert FALSE_ALARM == 1e-6


def test_a_token_that_is_ruled_out_is_named_with_its_rank():
    row = np.log(np.array([[0.2, 0.5, 0.3]]))
    with raises_error(AssertionError, "token 0", "3", "2"):
        SampledTokens(SamplingParams(top_k=2)).add(row, np.array([0]))
