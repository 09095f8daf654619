"""Configuration of `acme`. Imports nothing heavy."""

from collections.abc import Mapping
from typing import Literal

from roll_core.spec.config import NonNegativeFloat, RewardConfig


class AcmeRewardConfig(RewardConfig):
    """`rewards.<domain>` with `reward: acme`."""

    reward: Literal["acme"]
    ground_truth: str = "ground_truth"
    """Column with the correct number."""
    tolerance: NonNegativeFloat = 0.0
    """Maximum absolute difference to the correct number."""

    def columns(self) -> Mapping[str, str]:
        """Columns that `roll-core check` looks for in the rows."""
        return {"ground_truth": self.ground_truth}
