"""What the dispatcher asks of a replica of an engine, real or simulated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roll_core.errors import WorkerDiedError
    from roll_core.types import Completion, GenerateRequest

    Answered = Callable[[str, Completion | BaseException], None]
    """Takes the id of a request and its completion, or why there is none: `WorkerDiedError` where the replica is gone,
    anything else where the request is at fault."""


class Replica(ABC):
    """One engine that draws tokens. All calls on one event loop."""

    name: str
    """For messages."""

    @abstractmethod
    def begin(self, requests: Sequence[GenerateRequest], answered: Answered) -> None:
        """Enter `requests` together. `answered` is called once for each that is not forgotten, later and never from
        within this call."""

    @abstractmethod
    async def abort(self, ids: Sequence[str]) -> None:
        """End requests with what they have (`finish_reason == "abort"`), which they are answered with. One that has
        not arrived yet may be missed: whoever waits asks again."""

    @abstractmethod
    def forget(self, ids: Sequence[str]) -> None:
        """End requests that nobody waits for: they are not answered."""

    @abstractmethod
    async def progress(self) -> list[Completion] | None:
        """What the running requests have drawn so far; None where the engine does not tell. What is left if the replica
        dies, and the sign that it lives."""

    @abstractmethod
    async def give_up(self, why: str) -> WorkerDiedError:
        """End it: it shows no sign of life. Returns its death; nobody waits for what runs there any more."""
