"""Unbiased estimates of the metrics of several responses per prompt: pass@k, best@k and maj@k."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.types import Reward, Sample


def best_of_k_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`pass@k`, `best@k` and `maj@k` for k = 2, 4, 8, … and the number of responses to a prompt, mean over prompts.

    Each is the expected value over all subsets of k of the prompt's responses, which is unbiased (arXiv:2107.03374):

    * `pass@k`: the probability that one of them is correct, which means a reward of at least 1.
    * `best@k`: the highest reward.
    * `maj@k`: the reward of the most frequent answer; of several, each wins with equal probability. Only if rewards
      have a text `answer` in their detail, as `math_rule` has. No answer counts as one. Answers are compared as texts.

    Failed rewards do not count; a prompt with fewer than k rewards is left out of the metrics of k.
    """
    groups: defaultdict[tuple[str, str], list[Reward]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None and sample.reward.value is not None:
            groups[sample.group_id, sample.player].append(sample.reward)
    most = max((len(rewards) for rewards in groups.values()), default=0)
    metrics: dict[str, float] = {}
    for k in sorted({most, *(2**power for power in range(1, most.bit_length()))} - {0, 1}):
        rewards = [group for group in groups.values() if len(group) >= k]
        scores = [sorted(reward.value or 0.0 for reward in group) for group in rewards]
        metrics[f"pass@{k}"] = statistics.fmean(
            best_of_k([float(score >= 1) for score in group_scores], k) for group_scores in scores
        )
        metrics[f"best@{k}"] = statistics.fmean(best_of_k(group_scores, k) for group_scores in scores)
        answered = [[(_answer_of(reward), reward.value or 0.0) for reward in group] for group in rewards]
        if any(answer for group in answered for answer, _ in group):
            metrics[f"maj@{k}"] = statistics.fmean(majority_of_k(group, k) for group in answered)
    return metrics


def _answer_of(reward: Reward) -> str:
    """The answer that the reward extracted, empty if there is none: the text `answer` of its detail, or of a part of a
    composite."""
    texts = (text for name, text in reward.detail.items() if name.rpartition("/")[2] == "answer")
    return next((text for text in texts if isinstance(text, str)), "")


def best_of_k(scores: Sequence[float], k: int) -> float:
    """Expected maximum of k of the ascending `scores`, sampled without replacement."""
    total = math.comb(len(scores), k)
    return math.fsum(score * (math.comb(rank, k - 1) / total) for rank, score in enumerate(scores))


def majority_of_k(answers: Sequence[tuple[str, float]], k: int) -> float:
    """Expected score of the majority vote of k of the pairs of answer and score, sampled without replacement."""
    by_answer: defaultdict[str, list[float]] = defaultdict(list)
    for answer, score in answers:
        by_answer[answer].append(score)
    counts = sorted(map(len, by_answer.values()))
    wins = dict(zip(counts, _majority_shares(tuple(counts), k), strict=True))
    return math.fsum(wins[len(scores)] * statistics.fmean(scores) for scores in by_answer.values())


@lru_cache(maxsize=4096)
def _majority_shares(counts: tuple[int, ...], k: int) -> tuple[float, ...]:
    """Probability that each answer, which `counts` responses have, wins the vote of k responses."""
    total = math.comb(sum(counts), k)
    shares = []
    for index, count in enumerate(counts):
        wins = Fraction(0)
        for votes in range(1, min(count, k) + 1):
            # Number of ways to choose the other responses, by how many are chosen and how many answers tie.
            ways: Counter[tuple[int, int]] = Counter({(votes, 0): math.comb(count, votes)})
            for other in (*counts[:index], *counts[index + 1 :]):
                further: Counter[tuple[int, int]] = Counter()
                for (chosen, ties), number in ways.items():
                    for more in range(min(other, votes, k - chosen) + 1):
                        further[chosen + more, ties + (more == votes)] += number * math.comb(other, more)
                ways = further
            wins += sum(Fraction(number, ties + 1) for (chosen, ties), number in ways.items() if chosen == k)
        shares.append(float(wins / total))
    return tuple(shares)
