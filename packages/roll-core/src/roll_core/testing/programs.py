"""What the ranks do: functions that the kit runs on every rank of a role, each in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.testing.bench import built, outputs, take_step, weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.spec.train import StepStats, Want
    from roll_core.testing.bench import Arrays, Case, Split, Step
    from roll_core.types import DataRank, Floats, TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one rank saw of some optimizer steps."""

    data_rank: DataRank
    stats: tuple[StepStats, ...]
    metrics: tuple[dict[str, float], ...]
    """Of each step, this rank's share."""
    before: Arrays
    """Weights at the start; empty on ranks whose exports nobody reads."""
    after: Arrays


def score(
    rank: int, case: Case, sequences: Sequence[TrainSequence], want: Want, split: Split
) -> dict[str, dict[str, Floats]]:
    """Outputs of a freshly built model."""
    with built(case, rank) as strategy:
        return outputs(strategy, sequences, want, split)


def train(rank: int, case: Case, steps: Sequence[Step]) -> Trained:
    """Some optimizer steps of a freshly built model."""
    with built(case, rank) as strategy:
        before = weights(strategy)
        done = [take_step(strategy, step) for step in steps]
        return Trained(
            data_rank=strategy.data_rank,
            stats=tuple(stats for stats, _ in done),
            metrics=tuple(metrics for _, metrics in done),
            before=before,
            after=weights(strategy),
        )
