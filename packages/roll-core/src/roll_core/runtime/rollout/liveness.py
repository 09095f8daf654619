"""Signs of life of the replicas that have work, and what they have drawn.

replica ── answers ─────────────────────────────────────────────► heard
        ◄─ progress(), each asked by itself ─► more tokens? ────► heard, and noted
                                               nothing heard for too long ──► given up, as if it had died
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.errors import InvalidCompletionError, RollError, WorkerDiedError
from roll_core.runtime.concurrency import background

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from roll_core.runtime.rollout.routing import Seat

log = logging.getLogger(__name__)

POLLS = 4
"""A poll may take this part of a replica's time, and is then asked again: an engine tells between two steps."""
PAUSES = 20
"""Between two polls lies so many times what the last one took: what a full engine has drawn is much to send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a replica that has work may show no sign of life. How long a request takes is its own affair: it may
    wait in the engine's queue."""

    tokens_s: float = math.inf
    """Without a new token and without an answer (`replica_timeout`)."""
    answers_s: float = math.inf
    """Without an answer, where the engine does not tell what it has drawn (`rpc_timeout`)."""


ENDLESS = Patience()


class Watch:
    """Owned by a fleet. A task for each replica that has work: one that hangs keeps no other from being asked."""

    def __init__(self, patience: Patience, poll_s: float, give_up: Callable[[Seat, str], Awaitable[None]]) -> None:
        """Ask every `poll_s` seconds; 0 never asks, and gives nobody up. `give_up` is told why."""
        self._patience, self._poll_s, self._give_up = patience, poll_s, give_up
        self._limit_s = max(poll_s, patience.tokens_s / POLLS)
        self._tasks: dict[Seat, asyncio.Task[None]] = {}
        self._warned: set[Seat] = set()
        self._resting = 0

    def begin(self, seat: Seat) -> None:
        """It has work."""
        if self._poll_s and seat not in self._tasks:
            self._tasks[seat] = background(self._follow(seat), name=f"{seat.replica.name}: progress")

    def heard(self, seat: Seat) -> None:
        """It lives."""
        seat.heard_at, seat.silent_s = asyncio.get_running_loop().time(), 0.0

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Nobody is expected to draw anything: this time does not count."""
        self._resting += 1
        try:
            yield
        finally:
            self._resting -= 1
            for seat in self._tasks:
                self.heard(seat)

    async def close(self) -> None:
        """Ask no more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, seat: Seat) -> None:
        try:
            pause_s, looked_at = self._poll_s, seat.heard_at
            while seat.alive and seat.running:
                await asyncio.sleep(pause_s)
                took_s = await self._ask(seat)
                now, longest_s = asyncio.get_running_loop().time(), pause_s + self._limit_s
                # Longer than that it was this loop that stood still, and saw no sign of life for that.
                seat.silent_s += min(now - max(seat.heard_at, looked_at), longest_s)
                looked_at = now
                pause_s = min(max(self._poll_s, PAUSES * took_s), self._limit_s)
                if why := self._silence(seat):
                    await self._give_up(seat, why)
                    return
        finally:
            del self._tasks[seat]

    async def _ask(self, seat: Seat) -> float:
        """Seconds that it took."""
        time = asyncio.get_running_loop().time
        begun, limit_s = time(), None if self._limit_s == math.inf else self._limit_s
        try:
            told = await asyncio.wait_for(seat.replica.progress(), limit_s)
        except InvalidCompletionError:
            raise
        except (
            TimeoutError,
            WorkerDiedError,
        ) as error:  # requests of a dead replica fail with its death
            log.debug("%s did not report its progress: %r", seat.replica.name, error)
            return 0.0
        except RollError as error:
            if seat not in self._warned:
                self._warned.add(seat)
                log.warning("%s did not report its progress: %s", seat.replica.name, error)
            return 0.0
        seat.tells = told is not None
        for completion in told or ():
            piece = seat.running.get(completion.id)
            if piece is not None and piece.note(completion.outputs):
                self.heard(seat)
        return time() - begun

    def _silence(self, seat: Seat) -> str:
        """Why it is given up; empty if it is not."""
        if self._resting or not seat.running or not seat.alive:
            return ""
        limit_s = self._patience.tokens_s if seat.tells else self._patience.answers_s
        silent_s = seat.silent_s
        if silent_s < limit_s:
            return ""
        first, *others = seat.running
        work = f"the request {first}" + (f" and {len(others)} more" if others else "")
        if seat.tells:
            return f"{work} waited {silent_s:.0f} s for a token, replica_timeout allows {limit_s:g} s"
        return (
            f"{work} waited {silent_s:.0f} s for an answer, rpc_timeout allows {limit_s:g} s (its engine does not tell"
            " what it has drawn)"
        )
