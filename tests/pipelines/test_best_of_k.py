"""pass@k, best@k and maj@k against the mean over all subsets of k responses."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.pipelines.best_of_k import best_of_k, best_of_k_metrics, majority_of_k
from roll_core.pipelines.stages import score_metrics
from roll_core.types import Reward, Sample


def sample(group: str, index: int, value: float | None, *, tag: str = "", **detail: str) -> Sample:
    return Sample(
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
    # Prompt a: one of four is right. pass@2 = 1 - C(3, 2) / C(4, 2) = 1/2. Prompt b: all are right.
    # Majority of four: "7" three times for a, which is wrong, and the right answer for b.
    answers = {"a": ["7", "7", "7", "9"], "b": ["1", "1", "1", "1"]}
    samples = [
        sample(group, i, 1.0 if text in ("9", "1") else 0.0, answer=text)
        for group, texts in answers.items()
        for i, text in enumerate(texts)
    ]
    found = best_of_k_metrics(samples)
    assert found == {
        "pass@2": pytest.approx(0.75), "best@2": pytest.approx(0.75), "maj@2": pytest.approx((1 / 4 + 1) / 2),
        "pass@4": 1.0, "best@4": 1.0, "maj@4": 0.5,
    }  # fmt: skip


def test_partial_credit_is_no_pass_and_answers_are_optional():
    found = best_of_k_metrics([sample("a", 0, 0.5), sample("a", 1, 0.25)])
    assert found == {"pass@2": 0.0, "best@2": 0.5}


def test_failed_rewards_are_no_responses():
    samples = [sample("a", 0, 1.0), sample("a", 1, None), sample("b", 0, 0.0), sample("b", 1, 0.5), sample("b", 2, 0.0)]
    found = best_of_k_metrics(samples)  # a has one reward, b three: the metrics are those of b
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
