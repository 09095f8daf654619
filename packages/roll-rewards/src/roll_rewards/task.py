"""Environment `rewarded_task`: a row of the data as an episode, which a reward scores.

row ──► first message ──► reply ──► reward ──┬─► full marks, or no attempt is left: the end
                           ▲                 └─► why not, as the next message ─┐
                           └───────────────────────────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import override

from roll_core.errors import DataError, RewardFailure
from roll_core.spec.environment import Environment, Opening, Reply, Turn
from roll_core.spec.rollout import RewardRequest
from roll_core.types import Reward, Sample
from roll_rewards.composite import CLASSES, CompositeReward
from roll_rewards.config import AnyReward

if TYPE_CHECKING:
    from roll_core.spec.environment import Message, Task
    from roll_core.spec.rollout import RewardFunction


class RewardedTask(Environment):
    """Up to `max_attempts` replies to the prompt of a row. The reward of the last one is the episode's."""

    def __init__(
        self, reward: dict[str, Any], max_attempts: int, prompt: str, feedback: str, full_marks: float
    ) -> None:
        config = TypeAdapter(AnyReward).validate_python(reward)
        cls: type[RewardFunction] = (CLASSES | {"composite": CompositeReward})[config.reward]
        self._reward = cls(config)
        self._weight, self._max_attempts = config.weight, max_attempts
        self._prompt, self._feedback, self._full_marks = prompt, feedback, full_marks
        self._attempts = 0
        self._found: Reward | None = None

    @override
    def reset(self, task: Task, seed: int) -> Opening:
        self._task = dict(task)
        messages: Any = self._task.get("messages") or self._task.get(self._prompt)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not isinstance(messages, list) or not messages:
            raise DataError(f"the row has no prompt in its column {self._prompt!r}: it has {', '.join(sorted(task))}")
        self._messages: list[Message] = messages
        self._reward.start()
        return Opening(messages=messages)

    @override
    def step(self, reply: Reply) -> Turn:
        self._attempts += 1
        reward = self._reward.score(self._request(reply.text))
        if reward.value is None:
            raise RewardFailure(reward.failure)
        self._found = Reward(value=self._weight * reward.value, detail=reward.detail)
        metrics = {"full_marks": float(reward.value >= self._full_marks)}
        if reward.value >= self._full_marks or self._attempts == self._max_attempts:
            return Turn(done=True, metrics=metrics)
        why = next((text for name, text in reward.detail.items() if name.rpartition("/")[2] == "why"), "")
        message = {"role": "user", "content": self._feedback.replace("{why}", str(why))}
        return Turn(messages=[message], metrics=metrics)

    @override
    def score(self) -> Reward | None:
        return self._found

    @override
    def close(self) -> None:
        self._reward.close()

    def _request(self, text: str) -> RewardRequest:
        empty, floats = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        sample = Sample(
            id=str(self._task.get("id", "")),
            group_id="",
            prompt_ids=empty,
            response_ids=empty,
            logprobs=floats,
            loss_mask=np.zeros(0, dtype=np.bool_),
            versions=np.zeros(0, dtype=np.int32),
            finish_reason="stop",
            metadata=self._task,
        )
        prompt = "\n\n".join(str(message.get("content", "")) for message in self._messages)
        return RewardRequest(sample=sample, prompt=prompt, response=text, messages=self._messages)
