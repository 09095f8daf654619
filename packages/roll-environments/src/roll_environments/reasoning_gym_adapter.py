"""`reasoning_gym`: tasks of reasoning-gym's datasets, made from the seed and scored by the dataset."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn
from roll_environments.targets import calls_to

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.environment import Reply, Task


class ReasoningGym(Environment):
    """One question and one reply. The answer is the text in the last `<answer>` tag; without one, the reward is 0."""

    reports_success: ClassVar[bool] = True

    def __init__(self, *, dataset: str, options: Mapping[str, Any] | None = None, prompt: str | None = None) -> None:
        self.dataset, self.options, self.prompt = dataset, dict(options or {}), prompt

    @override
    def reset(self, task: Task, seed: int) -> Opening:
        package = importlib.import_module("reasoning_gym")
        with calls_to(f"reasoning_gym dataset {self.dataset}", "create_dataset"):
            self.data = package.create_dataset(self.dataset, size=1, seed=seed, **self.options)
            self.entry = self.data[0]
        instruction = "Write the answer between <answer> and </answer>." if self.prompt is None else self.prompt
        return Opening(messages=[{"role": "user", "content": f"{self.entry['question']}\n{instruction}"}])

    @override
    def step(self, reply: Reply) -> Turn:
        answer = importlib.import_module("reasoning_gym.utils").extract_answer(reply.text)
        if answer is None:
            return Turn(reward=0.0, done=True, metrics={"valid": 0.0, "success": 0.0})
        with calls_to(self.data, "score_answer"):
            reward = float(self.data.score_answer(answer, self.entry))
        return Turn(reward=reward, done=True, metrics={"valid": 1.0, "success": float(reward >= 1.0)})

    def oracle(self) -> list[str]:
        """The answer of the dataset."""
        return [f"<answer>{self.entry['answer']}</answer>"]
