"""Who asked for what, and how each request ended: the proof that nothing is lost and nothing counted twice."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from roll_core.errors import RollError

End = Literal["answered", "failed", "forgotten", "taken_back"]


class Accounts:
    """A ledger of ids. An id may come again once it has ended: a prompt that was taken back is asked again."""

    def __init__(self) -> None:
        self.asked = 0
        self.ended: Counter[End] = Counter()
        self.open: set[str] = set()
        self.continued = 0
        """Outputs that went on after they had been cut short."""
        self.lost_replicas = 0

    def begin(self, id: str) -> None:
        """Somebody asks. Raises `RollError` where the id is being worked on."""
        if id in self.open:
            raise RollError(f"request {id!r} is asked for twice: its answers could not be told apart")
        self.open.add(id)
        self.asked += 1

    def end(self, id: str, how: End) -> None:
        """It is over. Raises `RollError` where it was not open: something would count twice."""
        if id not in self.open:
            raise RollError(f"request {id!r} ends ({how}) though nobody waits for it")
        self.open.discard(id)
        self.ended[how] += 1

    def check(self) -> None:
        """Raise `RollError` unless every id that was asked is open or has ended once."""
        if self.asked != len(self.open) + sum(self.ended.values()):
            raise RollError(f"{self.asked} requests were asked, {dict(self.ended)} ended and {len(self.open)} are open")
