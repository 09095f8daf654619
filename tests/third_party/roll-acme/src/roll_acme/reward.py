"""Acme's reward."""

from __future__ import annotations

from roll_core.spec.rollout import RewardFunction, RewardRequest
from roll_core.types import Reward


class ShareOfLetter(RewardFunction):
    """Share of one letter in the answer's text."""

    def score(self, request: RewardRequest) -> Reward:
        text = request.response
        return Reward(value=text.count(self.config.letter) / len(text) if text else 0.0)
