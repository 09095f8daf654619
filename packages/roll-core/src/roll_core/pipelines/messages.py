"""Guard messages that several pipelines share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll_core.spec.pipeline import Run, UpdateResult


def skipped(run: Run, update: UpdateResult) -> str:
    """Message for optimizer steps that were skipped because the gradient was not finite."""
    return (
        f"step {run.step + 1}: {update.num_not_finite} of {update.num_steps} optimizer steps had a gradient that is NaN"
        " or infinite and changed nothing; lower the learning rate, clip the gradient, or look at the rewards"
    )
