"""`sokoban`: the agent pushes boxes onto targets. Levels are made by pulling boxes away from the targets."""

from __future__ import annotations

import random
import re
from collections import deque
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn
from roll_pipeline_agentic.environments.board import AGENT, BOX, TARGET, board_message

if TYPE_CHECKING:
    from roll_core.spec.environment import Message, Reply, Task
    from roll_pipeline_agentic.environments.board import Observation

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
WORD = re.compile(rf"(?<![a-z])(?:{'|'.join(MOVES)})(?![a-z])", re.IGNORECASE)
SHAPES = {"P": (AGENT,), "X": (BOX,), "O": (TARGET,), "V": (BOX, TARGET), "S": (TARGET, AGENT)}
RULES = {
    "text": "Push each box X onto a target O. P is you, # a wall. Reply with up, down, left or right.",
    "image": "Push each brown box onto a red ring. The blue circle is you, dark fields are walls. Reply with up, down,"
    " left or right.",
}
Field = tuple[int, int]
Boxes = frozenset[Field]

ATTEMPTS = 1000
PULLS = 40
"""Random moves with which a level is made. The level can be solved by their inverses."""


class Sokoban(Environment):
    """A room: # wall, P agent, X box, O target, V box on a target, S agent on a target. A solved level has reward 1."""

    reports_success: ClassVar[bool] = True

    def __init__(
        self,
        *,
        rows: int = 6,
        columns: int = 6,
        boxes: int = 1,
        box_reward: float = 0.0,
        observation: Observation = "text",
    ) -> None:
        self.rows, self.columns, self.num_boxes, self.box_reward = rows, columns, boxes, box_reward
        self.observation = observation

    @override
    async def reset(self, task: Task, seed: int) -> Opening:
        generator = random.Random(seed)
        for _ in range(ATTEMPTS):
            self._make(generator)
            if not self.boxes & self.targets:
                break
        else:
            raise RuntimeError(f"{ATTEMPTS} levels of {self.rows} x {self.columns} have boxes on targets: fewer boxes")
        return Opening(messages=[self._message(RULES[self.observation])], state=self.text())

    def _make(self, generator: random.Random) -> None:
        inside = [(row, column) for row in range(1, self.rows - 1) for column in range(1, self.columns - 1)]
        self.agent, *targets = generator.sample(inside, self.num_boxes + 1)
        self.boxes = self.targets = frozenset(targets)
        for _ in range(PULLS):
            move = generator.choice(list(MOVES.values()))
            to = _moved(self.agent, move)
            if self._is_wall(to) or to in self.boxes:
                continue
            behind = _moved(self.agent, (-move[0], -move[1]))
            if behind in self.boxes:
                self.boxes = self.boxes - {behind} | {self.agent}
            self.agent = to

    @override
    async def step(self, reply: Reply) -> Turn:
        words = WORD.findall(reply.text)
        if not words:
            message = self._message("Reply with up, down, left or right.")
            return Turn(messages=[message], reward=0.0, state=self.text(), metrics={"valid": 0.0})
        before = len(self.boxes & self.targets)
        self.agent, self.boxes = self.pushed(self.agent, self.boxes, MOVES[words[-1].lower()])
        change = len(self.boxes & self.targets) - before
        reward = self.box_reward * change
        if self.boxes == self.targets:
            return Turn(reward=reward + 1.0, done=True, metrics={"valid": 1.0, "success": 1.0})
        return Turn(messages=[self._message()], reward=reward, state=self.text(), metrics={"valid": 1.0})

    def pushed(self, agent: Field, boxes: Boxes, move: tuple[int, int]) -> tuple[Field, Boxes]:
        """Agent and boxes after a move; unchanged if it is blocked."""
        to = _moved(agent, move)
        if self._is_wall(to):
            return agent, boxes
        if to in boxes:
            beyond = _moved(to, move)
            if self._is_wall(beyond) or beyond in boxes:
                return agent, boxes
            boxes = boxes - {to} | {beyond}
        return to, boxes

    def oracle(self) -> list[str]:
        """Shortest moves that solve the level; empty if there are none."""
        start = (self.agent, self.boxes)
        queue: deque[tuple[tuple[Field, Boxes], list[str]]] = deque([(start, [])])
        known = {start}
        while queue:
            (agent, boxes), moves = queue.popleft()
            if boxes == self.targets:
                return moves
            for name, move in MOVES.items():
                state = self.pushed(agent, boxes, move)
                if state not in known:
                    known.add(state)
                    queue.append((state, [*moves, name]))
        return []

    def _message(self, *before: str) -> Message:
        return board_message(self.observation, self.text(), SHAPES, *before)

    def text(self) -> str:
        """The room, one row per line."""
        return "\n".join(
            "".join(self._sign((row, column)) for column in range(self.columns)) for row in range(self.rows)
        )

    def _sign(self, field: Field) -> str:
        on_target = field in self.targets
        if self._is_wall(field):
            return "#"
        if field == self.agent:
            return "S" if on_target else "P"
        if field in self.boxes:
            return "V" if on_target else "X"
        return "O" if on_target else "_"

    def _is_wall(self, field: Field) -> bool:
        row, column = field
        return not (0 < row < self.rows - 1 and 0 < column < self.columns - 1)


def _moved(field: Field, move: tuple[int, int]) -> Field:
    return field[0] + move[0], field[1] + move[1]
