"""What was asked, and how each request ended; compared with what those who asked wait for, from their own books."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

from roll_core.errors import RollError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
        self.askers: list[Callable[[], Iterable[str]]] = []
        """Each tells the ids that it waits for."""

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
        """Raise `RollError` unless each id that is open is waited for by one of those who ask, and no other id is."""
        waited_for = Counter(id for asker in self.askers for id in asker())
        wrong = {
            "waited for, but nobody works on them": waited_for.keys() - self.open,
            "worked on, but nobody waits for them": self.open - waited_for.keys(),
            "waited for twice": {id for id, times in waited_for.items() if times > 1},
        }
        if found := [f"{told(ids)} are {what}" for what, ids in wrong.items() if ids]:
            raise RollError(f"the accounts of requests do not agree: {'; '.join(found)}")


def told(ids: Iterable[str]) -> str:
    """Some of many ids."""
    few = sorted(ids)
    return ", ".join(few[:3]) + (f" and {len(few) - 3} more" if len(few) > 3 else "")
