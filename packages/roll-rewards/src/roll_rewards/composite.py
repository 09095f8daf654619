"""`reward: composite`: a weighted sum of rewards for the same sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import RewardFailure
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward
from roll_rewards.answers import F1, CrossThinkQA, ExactMatch, MultipleChoice
from roll_rewards.code import CodeReward
from roll_rewards.function import FunctionReward
from roll_rewards.ifeval import IFEvalReward
from roll_rewards.judges import JudgeReward
from roll_rewards.math_rule import MathRuleReward
from roll_rewards.rules import Format, LengthPenalty, RepetitionPenalty
from roll_rewards.services import HttpReward

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.rollout import RewardRequest
    from roll_rewards.config import CompositeConfig

CLASSES: dict[str, type[RewardFunction]] = {
    "code": CodeReward,
    "crossthink_qa": CrossThinkQA,
    "exact_match": ExactMatch,
    "f1": F1,
    "format": Format,
    "function": FunctionReward,
    "http": HttpReward,
    "ifeval": IFEvalReward,
    "judge": JudgeReward,
    "length_penalty": LengthPenalty,
    "math_rule": MathRuleReward,
    "multiple_choice": MultipleChoice,
    "repetition_penalty": RepetitionPenalty,
}
"""Class of each component, by the name of its reward."""


class CompositeReward(RewardFunction):
    """`Σ weight_i · value_i`. The detail has each `value_i`, for `adv_estimator: gdpo` and the records of samples.

    If a component fails, the sample fails: a sum without a component would be another reward.
    """

    config: CompositeConfig

    @override
    def start(self) -> None:
        self._components: dict[str, RewardFunction] = {}
        for name, config in self.config.components.items():
            component = CLASSES[config.reward](config)
            self._components[name] = component
            component.start()

    @override
    def unscorable(self, row: Mapping[str, Any]) -> str:
        for name, config in self.config.components.items():
            if problem := CLASSES[config.reward](config).unscorable(row):
                return f"{name}: {problem}"
        return ""

    @override
    def score(self, request: RewardRequest) -> Reward:
        total, detail = 0.0, dict[str, float | str]()
        for name, component in self._components.items():
            try:
                reward = component.score(request)
            except RewardFailure as failure:
                raise RewardFailure(f"{name}: {failure}") from failure
            if reward.value is None:
                raise RewardFailure(f"{name}: {reward.failure}")
            total += component.config.weight * reward.value
            texts = {f"{name}/{key}": text for key, text in reward.detail.items() if isinstance(text, str)}
            detail |= {name: reward.value, **texts}
        return Reward(value=total, detail=detail)

    @override
    def close(self) -> None:
        for component in getattr(self, "_components", {}).values():
            component.close()
