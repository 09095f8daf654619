"""Metrics of scored responses: pass@k, best@k and maj@k against all subsets of k responses, and their intervals."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.pipelines.best_of_k import best_of_k, majority_of_k
from roll_core.pipelines.score_metrics import paired_differences, score_metrics
from roll_core.runtime.records.scores import ScoredResponse
from roll_core.types import Reward, Sample


def sample(group: str, index: int, value: float | None, *, tag: str = "", **detail: str) -> ScoredResponse:
    scored = Sample(
        id=f"{group}/{index}",
        group_id=group,
        prompt_ids=np.array([1]),
        response_ids=np.array([2]),
        logprobs=np.zeros(1, dtype=np.float32),
        loss_mask=np.ones(1, dtype=bool),
        versions=np.zeros(1, dtype=np.int32),
        finish_reason="stop",
        tag=tag,
        reward=Reward(value=value, failure="" if value is not None else "broke", detail=detail),
    )
    return ScoredResponse.of(scored)


def metrics_at_k(responses: list[ScoredResponse]) -> dict[str, float]:
    """The metrics `pass@k`, `best@k` and `maj@k`, without their intervals."""
    metrics = score_metrics(responses).items()
    return {name.removeprefix("val/"): value for name, value in metrics if "@" in name and "/ci_" not in name}


def vote(answers: list[tuple[str, float]]) -> float:
    counts = Counter(answer for answer, _ in answers)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    return statistics.fmean(dict(answers)[answer] for answer in winners)


@settings(max_examples=60)
@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=8), st.data())
def test_estimates_are_means_over_all_subsets(texts, data):
    k = data.draw(st.integers(1, len(texts)))
    scores = {text: data.draw(st.floats(-1, 1)) for text in "abcd"}
    answers = [(text, scores[text]) for text in texts]
    subsets = list(combinations(answers, k))
    assert majority_of_k(answers, k) == pytest.approx(statistics.fmean(vote(list(each)) for each in subsets), abs=1e-9)
    best = statistics.fmean(max(score for _, score in each) for each in subsets)
    assert best_of_k(sorted(score for _, score in answers), k) == pytest.approx(best, abs=1e-9)


def test_metrics_of_two_prompts_with_four_responses():
    # Prompt a: one of four is right. pass@1 = 1/4, pass@2 = 1 - C(3, 2) / C(4, 2) = 1/2. Prompt b: all are right.
    # Majority of four: "7" three times for a, which is wrong, and the right answer for b.
    answers = {"a": ["7", "7", "7", "9"], "b": ["1", "1", "1", "1"]}
    samples = [
        sample(group, i, 1.0 if text in ("9", "1") else 0.0, answer=text)
        for group, texts in answers.items()
        for i, text in enumerate(texts)
    ]
    found = metrics_at_k(samples)
    assert found == {
        "pass@1": pytest.approx(0.625),
        "pass@2": pytest.approx(0.75), "best@2": pytest.approx(0.75), "maj@2": pytest.approx((1 / 4 + 1) / 2),
        "pass@4": 1.0, "best@4": 1.0, "maj@4": 0.5,
    }  # fmt: skip


def test_partial_credit_is_no_pass_and_answers_are_optional():
    found = metrics_at_k([sample("a", 0, 0.5), sample("a", 1, 0.25)])
    assert found == {"pass@1": 0.0, "pass@2": 0.0, "best@2": 0.5}


def test_failed_rewards_are_no_responses():
    samples = [sample("a", 0, 1.0), sample("a", 1, None), sample("b", 0, 0.0), sample("b", 1, 0.5), sample("b", 2, 0.0)]
    found = metrics_at_k(samples)  # a has one reward, b three: the metrics are those of b
    assert found["best@2"] == pytest.approx(0.5 * 2 / 3)
    assert found["best@3"] == 0.5


def test_single_response_per_prompt_has_only_means():
    metrics = score_metrics([sample("a", 0, 1.0), sample("b", 0, 0.0)])
    assert metrics["val/score/mean"] == 0.5
    assert not [name for name in metrics if "@" in name]


def test_every_tag_has_separate_metrics():
    samples = [sample(f"{tag}{i}", j, value, tag=tag) for tag, i, j, value in
               [("x", 0, 0, 1.0), ("x", 0, 1, 0.0), ("y", 0, 0, 0.0), ("y", 0, 1, 0.0)]]  # fmt: skip
    metrics = score_metrics(samples)
    assert [metrics[name] for name in ("val/pass@2", "val/x/pass@2", "val/y/pass@2")] == [0.5, 1.0, 0.0]


def test_score_mean_is_that_of_responses_and_length_is_cut():
    # Prompt a has one reward, b three: the mean is over the four responses, (1 + 0 + 0.5 + 0) / 4.
    samples = [sample("a", 0, 1.0), sample("a", 1, None), sample("b", 0, 0.0), sample("b", 1, 0.5), sample("b", 2, 0.0)]
    samples[0] = replace(samples[0], cut=True, num_tokens=6)
    metrics = score_metrics(samples)
    assert metrics["val/score/mean"] == 0.375
    assert metrics["val/response_length/mean"] == 2
    assert (metrics["val/response_length/cut_share"], metrics["val/reward_failures"]) == (0.2, 1)


def coin_tosses(rng: np.random.Generator, num_prompts: int, n: int) -> list[ScoredResponse]:
    """Responses to prompts whose success rates are uniform, so that the mean score is 1/2."""
    rates = rng.random(num_prompts)
    return [
        sample(f"{prompt}", index, float(rng.random() < rate))
        for prompt, rate in enumerate(rates)
        for index in range(n)
    ]


def test_intervals_cover_the_true_mean():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        metrics = score_metrics(coin_tosses(rng, 60, 2))
        covered += metrics["val/score/ci_low"] <= 0.5 <= metrics["val/score/ci_high"]
    assert 0.9 <= covered / 200 <= 0.99  # 95%, less that of percentiles of 60 prompts, ± 3 standard errors


def test_interval_has_the_width_of_the_standard_error():
    responses = coin_tosses(np.random.default_rng(1), 400, 1)
    metrics = score_metrics(responses)
    width = metrics["val/score/ci_high"] - metrics["val/score/ci_low"]
    spread = statistics.stdev(response.score for response in responses)
    assert width == pytest.approx(2 * 1.96 * spread / 400**0.5, rel=0.1)


def test_intervals_repeat_and_do_not_depend_on_the_order():
    responses = coin_tosses(np.random.default_rng(2), 20, 2)
    assert score_metrics(responses) == score_metrics(responses[::-1])


def test_paired_difference_cancels_the_difficulty_of_prompts():
    # The second model is right on one prompt in ten more. Unpaired, the intervals overlap.
    first = [sample(f"{prompt}", 0, float(prompt % 2)) for prompt in range(100)]
    second = [sample(f"{prompt}", 0, float(prompt % 2 or prompt % 10 == 0)) for prompt in range(100)]
    (difference,) = paired_differences(first, [*second, sample("other", 0, 1.0)])
    assert (difference.metric, difference.num_prompts) == ("score/mean", 100)
    assert difference.difference == pytest.approx(0.1)
    assert 0.03 < difference.low < 0.1 < difference.high < 0.17
    alone = [score_metrics(responses) for responses in (first, second)]
    assert alone[0]["val/score/ci_high"] > alone[1]["val/score/ci_low"]


def test_equal_models_differ_by_nothing():
    responses = coin_tosses(np.random.default_rng(3), 10, 4)
    differences = paired_differences(responses, responses)
    assert {difference.metric for difference in differences} >= {"score/mean", "pass@4", "best@2"}
    assert all(d.low == d.difference == d.high == 0 for d in differences)
