"""The vision example's environment: a board of 2 x 2 fields that the policy sees, and crosses in two moves."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

from roll_core.spec.environment import Environment, Opening, Turn
from roll_core.spec.rollout import IMAGE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from roll_core.spec.environment import Reply

MOVES = {"U": (0, -1), "D": (0, 1), "L": (-1, 0), "R": (1, 0)}
FIELD = 14
"""Pixels of a field, in each direction. The model sees the board of 28 x 28 pixels as one token."""
Field = tuple[int, int]


class Board(Environment):
    """The white square moves to the green one, which has reward 1. The red one ends the episode without a reward."""

    reports_success = True

    def __init__(self, *, blank: bool = False) -> None:
        """`blank`: all pictures are grey."""
        self.blank = blank

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        """Place the three squares."""
        self.random = random.Random(seed)
        fields = [(x, y) for x in range(2) for y in range(2)]
        self.place, self.goal, self.hole = self.random.sample(fields, 3)
        self.moves = 0
        return Opening(messages=[self._message()], state=self._state())

    async def step(self, reply: Reply) -> Turn:
        """Move the white square by U, D, L or R; at the border it stays."""
        self.place = moved(self.place, reply.text.strip())
        self.moves += 1
        won = self.place == self.goal
        if won or self.place == self.hole or self.moves == 2:
            return Turn(reward=float(won), done=True, metrics={"success": float(won)})
        return Turn(messages=[self._message()], reward=0.0, state=self._state())

    def oracle(self) -> list[str]:
        """The moves after which the goal is nearest, without those into the hole."""
        safe = {move: field for move in MOVES if (field := moved(self.place, move)) != self.hole}
        distance = {move: abs(x - self.goal[0]) + abs(y - self.goal[1]) for move, (x, y) in safe.items()}
        return [move for move in safe if distance[move] == min(distance.values())]

    def picture(self) -> Image.Image:
        """The board, in shades that differ from picture to picture."""
        if self.blank:
            return Image.new("RGB", (2 * FIELD, 2 * FIELD), (60, 60, 60))
        image = Image.new("RGB", (2 * FIELD, 2 * FIELD), tuple(self.random.randint(0, 60) for _ in range(3)))
        draw = ImageDraw.Draw(image)
        for (x, y), channels in ((self.place, (1, 1, 1)), (self.goal, (0, 1, 0)), (self.hole, (1, 0, 0))):
            colour = tuple(channel * self.random.randint(180, 255) for channel in channels)
            left, top = FIELD * x + self.random.randint(1, 3), FIELD * y + self.random.randint(1, 3)
            draw.rectangle((left, top, left + 9, top + 9), fill=colour)
        return image

    def _message(self) -> Mapping[str, Any]:
        return {"role": "user", "content": IMAGE, "media": [self.picture()]}

    def _state(self) -> str:
        return f"{self.place} {self.goal} {self.hole}"


def moved(place: Field, move: str) -> Field:
    """The field after a move; the same one at the border, and for text that is no move."""
    x, y = MOVES.get(move, (0, 0))
    return min(max(place[0] + x, 0), 1), min(max(place[1] + y, 0), 1)
