"""Unbiased estimates of the best and of the majority vote of k responses (arXiv:2107.03374)."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


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
