"""`frozen_lake`: the agent walks on a grid to the goal, and must not step into holes."""

from __future__ import annotations

import random
import re
from collections import deque
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn
from roll_pipeline_agentic.environments.board import AGENT, GOAL, HOLE, board_message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.environment import Message, Reply, Task
    from roll_pipeline_agentic.environments.board import Observation

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
WORD = re.compile(rf"(?<![a-z])(?:{'|'.join(MOVES)})(?![a-z])", re.IGNORECASE)
SHAPES = {"P": (AGENT,), "G": (GOAL,), "O": (HOLE,)}
RULES = {
    "text": "Walk from P to G. O is a hole. Reply with up, down, left or right.",
    "image": "Walk from the blue circle to the green square. Black circles are holes. Reply with up, down, left or"
    " right.",
}
Field = tuple[int, int]


class FrozenLake(Environment):
    """A map of `size` × `size` fields: P the agent, G the goal, O a hole, _ ice. The goal has reward 1."""

    reports_success: ClassVar[bool] = True

    def __init__(
        self,
        *,
        size: int = 4,
        holes: float = 0.2,
        slippery: float = 0.0,
        hole_reward: float = 0.0,
        observation: Observation = "text",
    ) -> None:
        self.size, self.share, self.slippery, self.hole_reward = size, holes, slippery, hole_reward
        self.observation = observation

    @override
    async def reset(self, task: Task, seed: int) -> Opening:
        self.random = random.Random(seed)
        fields = [(row, column) for row in range(self.size) for column in range(self.size)]
        while True:
            self.agent, self.goal = self.random.sample(fields, 2)
            free = [field for field in fields if field not in (self.agent, self.goal)]
            self.holes = {field for field in free if self.random.random() < self.share}
            if self.oracle():
                break
        return Opening(messages=[self._message(RULES[self.observation])], state=self.text())

    @override
    async def step(self, reply: Reply) -> Turn:
        words = WORD.findall(reply.text)
        if not words:
            message = self._message("Reply with up, down, left or right.")
            return Turn(messages=[message], reward=0.0, state=self.text(), metrics={"valid": 0.0})
        move = MOVES[words[-1].lower()]
        if self.random.random() < self.slippery:
            move = self.random.choice([(move[1], move[0]), (-move[1], -move[0])])
        self.agent = self.neighbour(self.agent, move)
        if self.agent == self.goal:
            return Turn(reward=1.0, done=True, metrics={"valid": 1.0, "success": 1.0})
        if self.agent in self.holes:
            return Turn(reward=self.hole_reward, done=True, metrics={"valid": 1.0, "success": 0.0})
        return Turn(messages=[self._message()], reward=0.0, state=self.text(), metrics={"valid": 1.0})

    def neighbour(self, field: Field, move: tuple[int, int]) -> Field:
        """The field after a move; the same at the border."""
        row, column = (min(max(coordinate + by, 0), self.size - 1) for coordinate, by in zip(field, move, strict=True))
        return row, column

    def oracle(self) -> list[str]:
        """Shortest moves to the goal; empty if there are none."""
        queue: deque[tuple[Field, list[str]]] = deque([(self.agent, [])])
        known = {self.agent}
        while queue:
            field, moves = queue.popleft()
            if field == self.goal:
                return moves
            for name, target in self._next(field):
                if target not in known:
                    known.add(target)
                    queue.append((target, [*moves, name]))
        return []

    def _next(self, field: Field) -> Iterator[tuple[str, Field]]:
        for name, move in MOVES.items():
            if (target := self.neighbour(field, move)) not in self.holes:
                yield name, target

    def _message(self, *before: str) -> Message:
        return board_message(self.observation, self.text(), SHAPES, *before)

    def text(self) -> str:
        """The map, one row per line."""
        signs = {self.goal: "G", **dict.fromkeys(self.holes, "O"), self.agent: "P"}
        return "\n".join(
            "".join(signs.get((row, column), "_") for column in range(self.size)) for row in range(self.size)
        )
