"""How often the guard `falling_reward` trips: on noise without a trend (false alarms), and on rewards that fall.

    ./run bench falling_reward [--runs 100]

Simulated scores, with the guard's defaults. Each run tests every step, as the run loop does, and ends at the first
alarm. Noise is normal; with an autocorrelation r its standard deviation stays the same.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
from common import write_result

from roll_core.runtime.records.trends import REWARD, VALIDATION, ScoreTrends
from roll_core.spec.config import FallingRewardConfig


def noise(rng: np.random.Generator, num: int, autocorrelation: float) -> np.ndarray:
    """Normal noise of standard deviation 1 with an autocorrelation between neighbours."""
    draws = rng.normal(size=num)
    for i in range(1, num):
        draws[i] = autocorrelation * draws[i - 1] + np.sqrt(1 - autocorrelation**2) * draws[i]
    return draws


def first_alarm(metric: str, scores: np.ndarray, start: int = 1) -> int | None:
    """Step, from 1, of the first alarm; None if there is none."""
    trends = ScoreTrends(FallingRewardConfig())
    for step, score in enumerate(scores.tolist(), start):
        trends.add(step, {metric: score})
        if trends.falling(step):
            return step
    return None


def cases(rng: np.random.Generator) -> dict[str, tuple[str, np.ndarray]]:
    """Metric and scores of one run of each case. Validations begin after the steps that the guard ignores."""
    fall = np.concatenate([np.full(100, 0.7), np.linspace(0.7, 0.5, 100)])
    return {
        "training, 500 steps, independent noise": (REWARD, 0.5 + 0.05 * noise(rng, 500, 0)),
        "training, 500 steps, autocorrelation 0.5": (REWARD, 0.5 + 0.05 * noise(rng, 500, 0.5)),
        "training, 500 steps, autocorrelation 0.8": (REWARD, 0.5 + 0.05 * noise(rng, 500, 0.8)),
        "validation, 30 evaluations, independent noise": (VALIDATION, 0.5 + 0.01 * noise(rng, 30, 0)),
        "training, 0.7 for 100 steps, then to 0.5 in 100": (REWARD, fall + 0.05 * noise(rng, 200, 0)),
        "validation, 0.01 less in each of 10 evaluations": (
            VALIDATION,
            0.7 - 0.01 * np.arange(10) + 0.01 * noise(rng, 10, 0),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    alarms: dict[str, list[int | None]] = {}
    for _ in range(arguments.runs):
        for name, (metric, scores) in cases(rng).items():
            start = 1 if metric == REWARD else FallingRewardConfig().after + 1
            step = first_alarm(metric, scores, start)
            alarms.setdefault(name, []).append(None if step is None else step - start + 1)
    lines = ["| simulated scores | runs | alarms | median step of the alarm |", "|---|--:|--:|--:|"]
    for name, steps in alarms.items():
        tripped = [step for step in steps if step is not None]
        median = f"{statistics.median(tripped):g}" if tripped else ""
        lines.append(f"| {name} | {len(steps)} | {len(tripped)} | {median} |")
    write_result("falling_reward", {"runs": arguments.runs, "alarms": alarms}, "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
