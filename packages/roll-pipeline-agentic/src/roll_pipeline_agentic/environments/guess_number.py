"""`guess_number`: the agent guesses a number, the environment replies higher or lower."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn

if TYPE_CHECKING:
    from roll_core.spec.environment import Reply, Task

NUMBER = re.compile(r"-?[0-9]{1,9}")


class GuessNumber(Environment):
    """A number from `low` to `high`. The last number in a reply is the guess; the right one has reward 1."""

    reports_success: ClassVar[bool] = True

    def __init__(self, *, low: int = 1, high: int = 100, step_penalty: float = 0.0) -> None:
        self.low, self.high, self.step_penalty = low, high, step_penalty

    @override
    async def reset(self, task: Task, seed: int) -> Opening:
        self.number = random.Random(seed).randint(self.low, self.high)
        self.candidates = (self.low, self.high)
        text = f"Guess a number from {self.low} to {self.high}."
        return Opening(messages=[{"role": "user", "content": text}], state=self._state())

    @override
    async def step(self, reply: Reply) -> Turn:
        numbers = NUMBER.findall(reply.text)
        if not numbers:
            return self._wrong("Reply with a number.", valid=False)
        guess = int(numbers[-1])
        if guess == self.number:
            return Turn(reward=1.0, done=True, metrics={"valid": 1.0, "success": 1.0})
        low, high = self.candidates
        self.candidates = (max(low, guess + 1), high) if guess < self.number else (low, min(high, guess - 1))
        return self._wrong("higher" if guess < self.number else "lower", valid=True)

    def _wrong(self, text: str, *, valid: bool) -> Turn:
        return Turn(
            messages=[{"role": "user", "content": text}],
            reward=0.0 - self.step_penalty,
            state=self._state(),
            metrics={"valid": float(valid)},
        )

    def _state(self) -> str:
        """What the replies so far imply."""
        return f"{self.candidates[0]}-{self.candidates[1]}"
