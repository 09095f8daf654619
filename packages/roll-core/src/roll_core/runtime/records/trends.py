"""Trends of rewards over steps, for the guard `falling_reward`: Mann and Kendall's test, Theil and Sen's slope.

    metrics of a step ─► ScoreTrends.add ─► window of each score ─► mann_kendall, theil_sen ─► what fell, or nothing

A window of rewards is short, noisy and not normally distributed, so both statistics use only the order of values, or
their median.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from roll_core.spec.config import FallingRewardConfig

REWARD, VALIDATION = "score/mean", "val/score/mean"
"""Metrics that are tested: the rewards of training samples, and those of held-out prompts."""
_CORRELATED = 20
"""Shortest series whose autocorrelation is estimated."""
_EXACT = 50
"""Longest series with an exact distribution; the normal approximation is accurate far earlier."""


class ScoreTrends:
    """Scores of a run so far, and whether they fall. The run loop adds each step."""

    def __init__(self, config: FallingRewardConfig) -> None:
        self._config = config
        self._values: dict[str, list[tuple[int, float]]] = {REWARD: [], VALIDATION: []}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the scores of a step, counted from 1. Ignores values that are missing or not finite, and early steps."""
        for name, values in self._values.items():
            value = metrics.get(name, math.nan)
            if math.isfinite(value) and step > self._config.after:
                values.append((step, float(value)))

    def falling(self, step: int) -> str:
        """Describe which scores of `step`, the last step, fall over their window. Empty if none does."""
        config = self._config
        described = []
        tests = ((REWARD, config.window, config.p_value), (VALIDATION, config.val_window, config.val_p_value))
        for name, size, p_value in tests:
            window = self._values[name][-size:]
            if len(window) < size or window[-1][0] != step:
                continue
            values = [value for _, value in window]
            fall = -theil_sen(values) * (size - 1)
            history = [value for _, value in self._values[name]]
            least = config.threshold * (max(history) - min(history))
            if fall > 0 and fall >= least and mann_kendall(values) <= p_value:
                described.append(f"{name} fell by {fall:.3g} from step {window[0][0]} to {window[-1][0]}")
        return ", ".join(described)


def mann_kendall(values: Sequence[float]) -> float:
    """One-sided p-value of a falling trend: the probability that independent equal draws fall as much in order.

    H. B. Mann, Nonparametric tests against trend, Econometrica 13 (1945); M. G. Kendall, Rank correlation methods. S
    is the number of rising pairs less that of falling pairs. Up to 50 values without ties have the exact distribution
    of S. Otherwise S is normal, with continuity correction, and with Kendall's variance for ties. Equal values: 1.

    Scores of consecutive steps are alike. From 20 values on, the variance of S grows by (1 + r) / (1 - r), with r the
    autocorrelation of the values without their trend, if it is positive (S. Yue and C. Wang, Water Resources Management
    18, 2004).
    """
    n = len(values)
    x = np.asarray(values, dtype=np.float64)
    s = int(np.sign(x[None, :] - x[:, None])[np.triu_indices(n, 1)].sum())
    ties = [count for count in Counter(x.tolist()).values() if count > 1]
    r = max(0.0, _autocorrelation(x)) if n >= _CORRELATED else 0.0
    if not ties and n <= _EXACT and r == 0:
        rising = (n * (n - 1) // 2 + s) // 2
        return min(float(_inversions(n)[: rising + 1].sum()), 1.0)
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    variance *= (1 + r) / (1 - r)
    if variance <= 0:
        return 1.0
    return 0.5 * math.erfc(-(s + 1) / math.sqrt(2 * variance))


def theil_sen(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    """Median slope of all pairs, per step of the series (P. K. Sen, JASA 63, 1968). 29% of outliers do not move it."""
    x = np.asarray(values, dtype=np.float64)
    i, j = np.triu_indices(len(x), 1)
    return float(np.median((x[j] - x[i]) / (j - i)))


def _autocorrelation(x: npt.NDArray[np.float64]) -> float:
    """Correlation of consecutive values around their Theil-Sen line."""
    residuals = x - theil_sen(x) * np.arange(len(x))
    residuals -= residuals.mean()
    square = float(residuals @ residuals)
    return float(residuals[1:] @ residuals[:-1]) / square if square > 0 else 0.0


@lru_cache(maxsize=8)
def _inversions(n: int) -> npt.NDArray[np.float64]:
    """Probability of each number of inversions of a random permutation of `n` values, in order."""
    probabilities = np.ones(1)
    for k in range(2, n + 1):
        probabilities = np.convolve(probabilities, np.full(k, 1 / k))
    return probabilities
