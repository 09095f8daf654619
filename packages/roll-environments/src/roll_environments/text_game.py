"""`text_game`: find the key in a house of rooms, and open the chest with it. Rooms and places come from the seed."""

from __future__ import annotations

import random
import re
from collections import deque
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn

if TYPE_CHECKING:
    from roll_core.spec.environment import Reply, Task

NAMES = (
    *("attic", "balcony", "bathroom", "bedroom", "cellar", "conservatory", "corridor", "dining room", "garage"),
    *("hall", "kitchen", "larder", "laundry", "library", "lounge", "nursery", "office", "pantry", "porch", "study"),
)
MOVES = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
COMMAND = re.compile(r"\b(?:go (north|south|west|east)|(take key)|(open chest)|(look))\b", re.IGNORECASE)
HELP = "Commands: go north, go south, go west, go east, take key, open chest, look."
Place = tuple[int, int]


class TextGame(Environment):
    """Rooms on a grid, connected by doors. The last command in a reply counts. Opening the chest has reward 1."""

    reports_success: ClassVar[bool] = True

    def __init__(self, *, rooms: int = 6, key_reward: float = 0.0) -> None:
        self.num_rooms, self.key_reward = rooms, key_reward

    @override
    async def reset(self, task: Task, seed: int) -> Opening:
        generator = random.Random(seed)
        names = generator.sample(NAMES, self.num_rooms)
        self.rooms: dict[Place, str] = {(0, 0): names[0]}
        self.doors: set[frozenset[Place]] = set()
        while len(self.rooms) < self.num_rooms:
            room = generator.choice(list(self.rooms))
            neighbour = _moved(room, generator.choice(list(MOVES)))
            self.rooms.setdefault(neighbour, names[len(self.rooms)])
            self.doors.add(frozenset((room, neighbour)))
        self.position, self.key, self.chest = generator.sample(list(self.rooms), 3)
        self.has_key = False
        text = f"There is a chest in this house, and its key. Open the chest.\n{HELP}\n{self.look()}"
        return Opening(messages=[{"role": "user", "content": text}], state=self.state())

    @override
    async def step(self, reply: Reply) -> Turn:
        commands = COMMAND.findall(reply.text)
        if not commands:
            return self._turn(HELP, valid=False)
        direction, take, open_chest, _ = (word.lower() for word in commands[-1])
        if direction:
            if (to := _moved(self.position, direction)) not in self.neighbours():
                return self._turn("There is no door.", valid=False)
            self.position = to
        elif take:
            if self.has_key or self.position != self.key:
                return self._turn("There is no key here.", valid=False)
            self.has_key = True
            return self._turn("You have the key.", reward=self.key_reward)
        elif open_chest:
            if self.position != self.chest:
                return self._turn("There is no chest here.", valid=False)
            if not self.has_key:
                return self._turn("The chest is locked.", valid=False)
            return Turn(reward=1.0, done=True, metrics={"valid": 1.0, "success": 1.0})
        return self._turn(self.look())

    def _turn(self, text: str, *, reward: float = 0.0, valid: bool = True) -> Turn:
        return Turn(
            messages=[{"role": "user", "content": text}],
            reward=reward,
            state=self.state(),
            metrics={"valid": float(valid)},
        )

    def look(self) -> str:
        """Description of the room."""
        doors = [f"{move} ({self.rooms[_moved(self.position, move)]})" for move in self._directions()]
        things = ["a chest"] * (self.position == self.chest) + ["a key"] * (
            self.position == self.key and not self.has_key
        )
        here = f" You see {' and '.join(things)}." if things else ""
        return f"You are in the {self.rooms[self.position]}.{here} Doors: {', '.join(doors)}."

    def state(self) -> str:
        """Room, and whether the agent has the key."""
        return f"{self.rooms[self.position]}{' with key' * self.has_key}"

    def neighbours(self) -> list[Place]:
        """Rooms behind the doors."""
        return [_moved(self.position, move) for move in self._directions()]

    def _directions(self) -> list[str]:
        return [move for move in MOVES if frozenset((self.position, _moved(self.position, move))) in self.doors]

    def oracle(self) -> list[str]:
        """Shortest commands that open the chest."""
        to_key, to_chest = self._path(self.position, self.key), self._path(self.key, self.chest)
        if self.has_key:
            return [*self._path(self.position, self.chest), "open chest"]
        return [*to_key, "take key", *to_chest, "open chest"]

    def _path(self, start: Place, goal: Place) -> list[str]:
        queue: deque[tuple[Place, list[str]]] = deque([(start, [])])
        known = {start}
        while queue:
            room, path = queue.popleft()
            if room == goal:
                return path
            for move in MOVES:
                to = _moved(room, move)
                if frozenset((room, to)) in self.doors and to not in known:
                    known.add(to)
                    queue.append((to, [*path, f"go {move}"]))
        raise AssertionError("the rooms are connected")


def _moved(room: Place, direction: str) -> Place:
    row, column = MOVES[direction]
    return room[0] + row, room[1] + column
