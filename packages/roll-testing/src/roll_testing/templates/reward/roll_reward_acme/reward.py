"""Reward `acme`: compares the last number of a response with the ground truth."""

import re

from roll_core.errors import RewardFailure
from roll_core.spec.rollout import RewardFunction, RewardRequest
from roll_core.types import Reward
from roll_reward_acme.config import AcmeRewardConfig

NUMBER = re.compile(r"-?\d{1,300}(?:\.\d{1,300})?")


class AcmeReward(RewardFunction):
    """1 if the numbers are equal, 0 if they differ or the response has none."""

    config: AcmeRewardConfig

    def score(self, request: RewardRequest) -> Reward:
        """Raises `RewardFailure` for a row without a ground truth: the response is not to blame."""
        try:
            expected = float(request.metadata[self.config.ground_truth])
        except (KeyError, TypeError, ValueError) as error:
            raise RewardFailure(f"the row has no number in the column {self.config.ground_truth}: {error}") from error
        numbers = NUMBER.findall(request.response)
        correct = bool(numbers) and abs(float(numbers[-1]) - expected) <= self.config.tolerance
        return Reward(value=float(correct), detail={"has_number": float(bool(numbers))})
