r"""`reward: math_rule`: 1 if the response's final answer equals the ground truth mathematically, else 0.

* Value 1 or 0: the answer was compared. An answer that is missing, garbled, or cannot be shown equal gets 0.
* Failure: no comparison was made. Scoring timed out, its process exited, or the ground truth is missing or is not
  mathematics.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.errors import DataError
from roll_core.runtime.workers.reward_pool import RewardPool
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward

if TYPE_CHECKING:
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
        truths = truths_of(request, config.ground_truth)
        found = self._pool.call({"response": request.response, "truths": truths}, config.timeout_s)
        return Reward(value=found["value"], detail={"answer": found["answer"]})

    @override
    def close(self) -> None:
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.close()


def truths_of(request: RewardRequest, column: str) -> list[str]:
    """Correct answers of a sample's row, as text. Raises `DataError` with sample and column if one is not usable."""
    value = request.metadata.get(column)
    values = value if isinstance(value, (list, tuple)) else [value]
    usable = [each for each in values if isinstance(each, (str, int, float)) and not isinstance(each, bool)]
    usable = [each for each in usable if isinstance(each, str) or math.isfinite(each)]
    if not values or len(usable) != len(values):
        known = ", ".join(sorted(request.metadata)) or "none"
        raise DataError(
            f"sample {request.sample.id}: column {column!r} holds {value!r}, and math_rule needs the right answer"
            f" there: text, a number, or a list of them (the row's columns: {known})"
        )
    # repr() of a float may be 1e-05, which the parser would read as a difference.
    return [format(Decimal(repr(each)), "f") if isinstance(each, float) else str(each) for each in usable]
