r"""`reward: math_rule`: 1 if the response's final answer equals the ground truth mathematically, else 0.

* Value 1 or 0: the answer was compared. An answer that is missing, garbled, or cannot be shown equal gets 0.
* Failure: no comparison was made. Scoring timed out, its process exited, or the ground truth is missing or is not
  mathematics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.data.reasoning import opens_reasoning
from roll_core.errors import DataError, RewardFailure
from roll_core.reward_pool import RewardPool
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward
from roll_rewards.answers import truths_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.rollout import RewardRequest
    from roll_rewards.config import MathRuleConfig


class MathRuleReward(RewardFunction):
    """Scores with math-verify in child processes, which are killed after `timeout_s`."""

    config: MathRuleConfig

    @override
    def start(self) -> None:
        """Start the first child process, which loads sympy; the first `score` blocks until that is done."""
        config = self.config
        self._pool = RewardPool(
            "roll_rewards.math_scorer:prepare",
            {"require_boxed": config.require_boxed, "float_rounding": config.float_rounding},
            size=config.processes,
            start_timeout_s=config.start_timeout_s,
            memory_mb=config.memory_limit_mb,
        )
        self._pool.start(wait=False)

    @override
    def score(self, request: RewardRequest) -> Reward:
        """Score 1 or 0, with the extracted answer as detail.

        Raises `RewardFailure` if no comparison was made, and `DataError` if the row has no usable ground truth.
        """
        config = self.config
        truths = truths_of(request.metadata, config.ground_truth, f"sample {request.sample.id}")
        opened = opens_reasoning(request.prompt)
        arguments = {"response": request.response, "truths": truths, "opened": opened}
        result = self._pool.call(arguments, config.timeout_s)
        return Reward(value=result["value"], detail={key: result[key] for key in ("answer", "why") if key in result})

    @override
    def unscorable(self, row: Mapping[str, Any]) -> str:
        from roll_rewards.math_scorer import read_truth  # loads sympy

        try:
            for truth in truths_of(row, self.config.ground_truth, "the row"):
                read_truth(truth)
        except (DataError, RewardFailure) as problem:
            return str(problem)
        return ""

    @override
    def close(self) -> None:
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.close()
