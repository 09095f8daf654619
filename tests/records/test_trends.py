"""The guard `falling_reward`: its statistics against hand-computed and exhaustive values, and the guard in runs."""

import itertools
import math

import numpy as np
import pytest

from roll_core.runtime.records.trends import ScoreTrends, mann_kendall, theil_sen
from roll_core.spec.config import FallingRewardConfig


def test_mann_kendall_counts_every_permutation():
    orders = list(itertools.permutations(range(6)))
    rising = {order: sum(b > a for a, b in itertools.combinations(order, 2)) for order in orders}
    for order in orders[::37]:
        expected = sum(pairs <= rising[order] for pairs in rising.values()) / math.factorial(6)
        assert mann_kendall(order) == pytest.approx(expected, rel=1e-12)


def test_mann_kendall_of_tied_values():
    # S = -5 of the pairs of 5, 4, 4, 2. Variance (4·3·13 - 2·1·9) / 18 = 7.667. z = (-5 + 1) / 2.769 = -1.4446.
    assert mann_kendall([5, 4, 4, 2]) == pytest.approx(0.07428, abs=1e-5)
    assert mann_kendall([0.5] * 30) == 1.0


def test_normal_approximation_continues_the_exact_values():
    falling = [-i + 20 * math.sin(3 * i) for i in range(30)]
    least, second = sorted(falling)[:2]
    exact, tied = mann_kendall(falling), mann_kendall([second if value == least else value for value in falling])
    assert 0.001 < exact < 0.1
    assert tied == pytest.approx(exact, rel=0.3)
    assert mann_kendall(sorted(falling)) > 0.999


def test_autocorrelated_noise_is_no_trend():
    """Without the correction a fifth of these windows has p ≤ 0.01."""
    rng, alarms = np.random.default_rng(1), 0
    for _ in range(300):
        scores = rng.normal(size=50)
        for i in range(1, 50):
            scores[i] = 0.8 * scores[i - 1] + 0.6 * scores[i]
        alarms += mann_kendall(scores) <= 0.01
    assert alarms <= 15


def test_variance_grows_with_the_autocorrelation():
    # Slope 0; residuals 0.75 (5) and -0.25 (15). r = (4·0.5625 - 0.1875 + 14·0.0625) / 3.75 = 0.7833, the factor 8.231.
    # S = -75. Variance (20·19·45 - 5·4·15 - 15·14·35) / 18 · 8.231 = 4321.2. z = -74 / 65.736 = -1.1257.
    assert mann_kendall([1.0] * 5 + [0.0] * 15) == pytest.approx(0.13014, abs=1e-4)


def test_theil_sen_is_the_median_slope_despite_an_outlier():
    assert theil_sen([3.0, 1.0, 0.5]) == -1.25  # slopes -2, -1.25, -0.5
    assert theil_sen([10 - 2 * i if i != 4 else 900.0 for i in range(12)]) == pytest.approx(-2.0)


def trends(**config):
    return ScoreTrends(FallingRewardConfig.model_validate({"p_value": 1e-3} | config))


def falling_steps(scores, name="score/mean", **config):
    """Steps at which the guard trips."""
    watch, steps = trends(**config), []
    for step, score in enumerate(scores, start=1):
        metrics = {} if score is None else {name: score}
        watch.add(step, metrics)
        steps += [step] if watch.falling(step) else []
    return steps


def test_reward_that_falls_after_the_first_steps_trips():
    falling = [1 - i / 100 for i in range(20)]
    assert falling_steps(falling, after=5, window=10) == [15, 16, 17, 18, 19, 20]
    assert falling_steps(falling, after=11, window=10) == []
    assert falling_steps(reversed(falling), after=0, window=10) == []


def test_validation_has_a_window_of_evaluations():
    falling = [0.5, 0.6, 0.59, 0.58, None, 0.57, 0.56, 0.5]
    assert falling_steps(falling, "val/score/mean", after=0, val_window=6, val_p_value=0.01) == [8]


@pytest.mark.parametrize("scores", [[0.5] * 40, [math.nan] * 40, [math.inf, *[0.0] * 40], [0.0, 1.0] * 20, [1.0] * 7])
def test_no_trend_trips_nothing(scores):
    assert falling_steps(scores, after=0, window=8) == []


def test_missing_values_shorten_no_window():
    falling = [value for i in range(12) for value in (1 - i / 12, math.nan)]
    assert falling_steps(falling, after=0, window=10) == [19, 21, 23]


def test_small_fall_after_a_large_rise_is_no_alarm():
    scores = [i / 10 for i in range(11)] + [1 - i / 1000 for i in range(1, 12)]
    assert falling_steps(scores, after=0, window=10) == []
    assert falling_steps(scores, after=0, window=10, threshold=0.005)
