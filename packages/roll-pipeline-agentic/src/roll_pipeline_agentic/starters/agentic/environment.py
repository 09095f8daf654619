"""The environment of this run, with its reward. Replace both by your own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.spec.environment import Environment, Opening, Turn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.environment import Reply


class Guess(Environment):
    """Find a number from 1 to `high`. Wrong guesses are answered with > (it is higher) or < (it is lower)."""

    def __init__(self, high: int = 8) -> None:
        self.high = high

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        """Begin an episode. `task` has the columns of a row."""
        self.number = task["number"] if task else 1 + seed % self.high
        return Opening(messages=[{"role": "user", "content": "?"}])

    async def step(self, reply: Reply) -> Turn:
        """Score a reply, and answer it. The reward of the episode is the sum over its turns."""
        text = reply.text.strip()
        if text == str(self.number):
            return Turn(reward=1.0, done=True)
        higher = not text.isdecimal() or int(text) < self.number
        return Turn(reward=0.0, messages=[{"role": "user", "content": ">" if higher else "<"}])
