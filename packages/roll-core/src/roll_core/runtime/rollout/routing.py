"""Which replica a request goes to."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import asyncio

    from roll_core.runtime.rollout.errands import Piece
    from roll_core.runtime.rollout.replica import Replica

    InLine = tuple[int, int, int, Piece]
    """Priority, order of arrival, a number of its own, and what waits."""

Routing = Literal["least_loaded", "prompt_affinity", "sticky"]
"""`least_loaded`: where the fewest outputs run. `prompt_affinity`: where its routing key has been before and keys and
values of the prompt may be, unless that replica is full or far busier than another. `sticky`: there, and it waits for
room."""

REMEMBERED = 1 << 16
"""Keys whose place is remembered; the longest unused are forgotten first."""
BUSIER_BY, BUSIER_TIMES = 64, 1.5
"""A replica is far busier than another with so many outputs more, and so many times as many: the rule of SGLang's
router (`cache_aware`: balance_abs_threshold, balance_rel_threshold)."""


@dataclass(eq=False, slots=True)
class Seat:
    """A replica that lives, and what runs on it."""

    replica: Replica
    number: int
    """In order of arrival: ties go to the lower one, so that routing is repeatable."""
    running: dict[str, Any] = field(default_factory=dict)
    """By id of the request that the replica knows."""
    load: int = 0
    """Outputs."""
    aborts: set[asyncio.Future[None]] = field(default_factory=set)
    """Calls that have not returned."""
    alive: bool = True
    heard_at: float = 0.0
    """When it showed a sign of life, or was given work while it had none, by the loop's clock."""
    silent_s: float = 0.0
    """Since then, as far as it was looked at."""
    tells: bool = True
    """It says what it has drawn, as far as is known."""
    waiting: list[InLine] = field(default_factory=list)
    """A heap of what will run here and nowhere else."""


class Router:
    """Chooses seats. Loads are told to it, so that a choice costs the logarithm of the number of replicas."""

    def __init__(self, routing: Routing, max_running: int | None) -> None:
        """At most `max_running` outputs on a replica, which are then asked for one by one."""
        self._routing, self._max = routing, max_running
        self._seats: dict[int, Seat] = {}
        self._heap: list[tuple[int, int]] = []
        """Load and number, with stale entries: one counts if it tells the seat's load."""
        self._homes: OrderedDict[str, Seat] = OrderedDict()
        """By key, the latest used last."""

    def add(self, seat: Seat) -> None:
        """A replica is there."""
        self._seats[seat.number] = seat
        heapq.heappush(self._heap, (seat.load, seat.number))

    def remove(self, seat: Seat) -> None:
        """A replica is gone."""
        seat.alive = False
        self._seats.pop(seat.number, None)

    def change(self, seat: Seat, by: int) -> None:
        """Outputs began or ended."""
        seat.load += by
        if seat.alive:
            heapq.heappush(self._heap, (seat.load, seat.number))
            if len(self._heap) > 64 + 8 * len(self._seats):
                self._heap = [(each.load, each.number) for each in self._seats.values()]
                heapq.heapify(self._heap)

    def has_room(self, seat: Seat) -> bool:
        """Whether more may run there."""
        return self._max is None or seat.load < self._max

    def home(self, key: str) -> Seat | None:
        """Where this key has to wait for room; None if it may run anywhere."""
        seat = self._homes.get(key) if self._routing == "sticky" else None
        return seat if seat is not None and seat.alive else None

    def choose(self, key: str) -> Seat | None:
        """A seat with room; None if there is none."""
        if self._routing != "least_loaded":
            seat = self._homes.get(key)
            if seat is not None and seat.alive:
                self._homes.move_to_end(key)
                if self._routing == "sticky":
                    return seat if self.has_room(seat) else None
                if self.has_room(seat) and not self._far_busier(seat):
                    return seat
        seat = self._least()
        if seat is None or not self.has_room(seat):
            return None
        if self._routing != "least_loaded":
            self._homes[key] = seat
            self._homes.move_to_end(key)
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        return seat

    def _far_busier(self, seat: Seat) -> bool:
        least = self._least()
        return least is not None and seat.load > max(least.load + BUSIER_BY, BUSIER_TIMES * least.load)

    def _least(self) -> Seat | None:
        while self._heap:
            load, number = self._heap[0]
            seat = self._seats.get(number)
            if seat is not None and seat.load == load:
                return seat
            heapq.heappop(self._heap)
        return None
