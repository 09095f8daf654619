"""`nim`: two players take stones in turns, and who takes the last one wins. The policy plays both."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn

if TYPE_CHECKING:
    from roll_core.spec.environment import Reply, Task

NUMBER = re.compile(r"-?[0-9]{1,9}")
OTHER = {"first": "second", "second": "first"}


class Nim(Environment):
    """The last number of a reply is the number of stones, 1 to `max_take`. The winner has reward 1, the loser -1.

    An invalid reply ends the game with the reward -1, and 0 for the other player.
    """

    def __init__(self, *, low: int = 5, high: int = 21, max_take: int = 3) -> None:
        self.low, self.high, self.max_take = low, high, max_take

    @override
    async def reset(self, task: Task, seed: int) -> Opening:
        self.stones, self.player = random.Random(seed).randint(self.low, self.high), "first"
        return Opening(messages=self._messages(), state=self.stones, players=("first", "second"), player=self.player)

    @override
    async def step(self, reply: Reply) -> Turn:
        other, numbers = OTHER[self.player], NUMBER.findall(reply.text)
        if not numbers or not 1 <= int(numbers[-1]) <= min(self.max_take, self.stones):
            return Turn(reward=-1.0, rewards={other: 0.0}, done=True, metrics={"valid": 0.0})
        best, taken = self.stones % (self.max_take + 1), int(numbers[-1])
        metrics = {"valid": 1.0} | ({"optimal": float(taken == best)} if best else {})
        self.stones -= taken
        if not self.stones:
            return Turn(reward=1.0, rewards={other: -1.0}, done=True, metrics=metrics)
        self.player = other
        return Turn(reward=0.0, messages=self._messages(), state=self.stones, player=other, metrics=metrics)

    def oracle(self) -> list[str]:
        """The reply that wins, if there is one; otherwise 1."""
        return [str(self.stones % (self.max_take + 1) or 1)]

    def _messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{self.stones} left, take 1 to {self.max_take}."}]
