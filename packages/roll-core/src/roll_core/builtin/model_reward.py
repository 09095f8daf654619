"""Reward `model`: the score of a reward model for the whole sequence."""

from __future__ import annotations

from typing_extensions import override

from roll_core.errors import RewardFailure
from roll_core.spec.rollout import RewardFunction, RewardRequest
from roll_core.types import Reward


class ModelReward(RewardFunction):
    """The model's output at the last token, as sequence classification models of transformers compute it."""

    @override
    def score(self, request: RewardRequest) -> Reward:
        """Return the last value. Raises `RewardFailure` if the model computed none."""
        if request.values is None or not len(request.values):
            raise RewardFailure("the reward model computed no value")
        return Reward(value=float(request.values[-1]))
