"""Options (`adv_options`) of the built-in advantage estimators. Imports nothing heavy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from roll_core.spec.config import AdvantageOptions, PositiveInt


class GRPOOptions(AdvantageOptions):
    """Options (`adv_options`) of `grpo`."""

    leave_one_out: bool = False
    """Compare each reward with the mean and deviation of the group's other samples."""


class PassAtKOptions(AdvantageOptions):
    """Options (`adv_options`) of `pass_at_k`."""

    k: PositiveInt
    """Number of responses of which the best counts."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """`mean`: compare with all subsets, over their deviation. `leave_one_out`: with the subset without the response."""

    @property
    @override
    def min_samples(self) -> int:
        return self.k + (self.baseline == "mean")

    @model_validator(mode="after")
    def _others_remain(self) -> PassAtKOptions:
        if self.baseline == "leave_one_out" and self.k == 1:
            raise ValueError("baseline leave_one_out compares a response with k - 1 others: set k to at least 2")
        return self


class GDPOOptions(AdvantageOptions):
    """Options (`adv_options`) of `gdpo`."""

    weights: Annotated[dict[str, float], Field(min_length=1)]
    """Weight of each component of the reward, by its name in the reward's detail."""
    batch_norm: bool = True
    """Normalise the weighted sum over the batch."""
