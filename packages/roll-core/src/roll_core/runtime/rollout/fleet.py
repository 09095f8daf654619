"""The replicas that live, and what runs on each of them.

Dispatcher ── accept, enter ──► Seat: Replica.begin ──► ended(piece, outcome)
                                a replica dies, or  ──► lost(pieces): they go on elsewhere
                                is given up
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from roll_core.errors import WorkerDiedError
from roll_core.runtime.rollout.routing import Seat

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from roll_core.runtime.rollout.accounts import Accounts
    from roll_core.runtime.rollout.errands import Errand, Piece
    from roll_core.runtime.rollout.liveness import Watch
    from roll_core.runtime.rollout.replica import Replica
    from roll_core.runtime.rollout.routing import InLine, Router
    from roll_core.types import Completion, GenerateRequest

ABORT_AGAIN_S = 0.5
"""An abort may overtake the request that it is to end, and is then asked again."""


class Fleet:
    """Owned by a dispatcher, which it calls back on the event loop and never from within `accept` and `enter`."""

    def __init__(
        self,
        router: Router,
        accounts: Accounts,
        *,
        ended: Callable[[Piece, Completion | BaseException], None],
        lost: Callable[[Sequence[Piece]], None],
        watch: Callable[[Callable[[Seat, str], Awaitable[None]]], Watch],
    ) -> None:
        """`watch` makes what watches over replicas, of what gives one up."""
        self._router, self._accounts = router, accounts
        self._ended, self._lost = ended, lost
        self.watch = watch(self._give_up)
        self._seats: list[Seat] = []
        self._numbers, self._attempts = itertools.count(), itertools.count()
        self._entering: dict[Seat, list[GenerateRequest]] = {}
        self._starved: set[Seat] = set()
        """Those with something that will run there and nowhere else."""
        self.num_running = 0
        """Outputs that replicas are drawing."""
        self._calm = asyncio.Event()
        """Set when nothing runs any more."""
        self._death: BaseException | None = None
        """Of the replica that died last."""

    # -- replicas ------------------------------------------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """One more."""
        seat = Seat(replica, next(self._numbers))
        self._seats.append(seat)
        self._router.add(seat)

    def remove(self, replica: Replica) -> None:
        """It is gone; one that had nothing to do may not have been missed. Unknown ones are ignored."""
        for seat in self._seats:
            if seat.replica is replica:
                self._lose(seat, _gone(replica))
                return

    @property
    def end(self) -> BaseException | None:
        """Why nobody is left to answer; None while somebody is, or nobody has died."""
        return None if self._seats else self._death

    async def _give_up(self, seat: Seat, why: str) -> None:
        self._lose(seat, await seat.replica.give_up(why))

    def _lose(self, seat: Seat, error: WorkerDiedError) -> None:
        if not seat.alive:
            return
        self._router.remove(seat)
        self._seats.remove(seat)
        self._starved.discard(seat)
        self._count(-seat.load)
        self._accounts.lost_replicas += 1
        running, seat.running = seat.running, {}
        for wire, piece in running.items():
            del piece.errand.running[wire]
        for abort in seat.aborts:
            abort.cancel()
        self._death = error
        lost = [*running.values(), *(piece for *_, piece in seat.waiting)]
        self._lost([piece for piece in lost if piece.errand.only_at is None])
        for piece in lost:
            if piece.errand.only_at is not None:
                self._ended(piece, error)

    def pieces(self) -> Iterator[Piece]:
        """What runs, and what waits for the replica where it has to run."""
        for seat in self._seats:
            yield from seat.running.values()
            yield from (piece for *_, piece in seat.waiting)

    # -- what begins ---------------------------------------------------------------------------------------------------

    def serve_waiting(self, priority: float = math.inf) -> None:
        """Accept what waits for the replica where it has to run, where there is room now, down to this priority."""
        for seat in list(self._starved):
            while seat.waiting and seat.waiting[0][0] <= priority and self._router.has_room(seat):
                self._place(seat, heapq.heappop(seat.waiting)[-1])
            if not seat.waiting:
                self._starved.discard(seat)

    def accept(self, in_line: InLine) -> bool:
        """Take a piece, or let it wait for the replica where it has to run. False where there is no room."""
        piece = in_line[-1]
        if piece.errand.only_at is not None:
            self._place_at(piece.errand.only_at, piece)
            return True
        request = piece.errand.request
        key = request.routing_key or request.id
        seat = self._router.choose(key)
        if seat is not None:
            self._place(seat, piece)
            return True
        home = self._router.home(key)
        if home is None:
            return False
        heapq.heappush(home.waiting, in_line)
        self._starved.add(home)
        return True

    def enter(self) -> None:
        """Begin what was accepted: what enters a replica together, at once."""
        entering, self._entering = self._entering, {}
        for seat, requests in entering.items():
            seat.replica.begin(requests, partial(self._answered, seat))
            self.watch.begin(seat)

    def _place_at(self, replica: Replica, piece: Piece) -> None:
        for seat in self._seats:
            if seat.replica is replica:
                self._place(seat, piece)
                return
        asyncio.get_running_loop().call_soon(self._ended, piece, self._death or _gone(replica))

    def _place(self, seat: Seat, piece: Piece) -> None:
        if piece.is_unwanted:
            return
        if not piece.is_fresh:
            self._accounts.continued += piece.drafts[0].num_tokens > 0
        request = piece.wire(self._attempts)
        if not seat.running:
            self.watch.heard(seat)
        seat.running[request.id] = piece
        piece.errand.running[request.id] = seat
        self._router.change(seat, piece.size)
        self._count(piece.size)
        self._entering.setdefault(seat, []).append(request)

    # -- what ends -----------------------------------------------------------------------------------------------------

    def _answered(self, seat: Seat, wire: str, outcome: Completion | BaseException) -> None:
        """A replica says how a piece ended. News of what was forgotten, or lost before, is no news."""
        if wire not in seat.running:
            return
        if isinstance(outcome, WorkerDiedError):
            self._lose(seat, outcome)
        else:
            self.watch.heard(seat)
            self._ended(self._left(seat, wire), outcome)

    def _left(self, seat: Seat, wire: str) -> Piece:
        piece: Piece = seat.running.pop(wire)
        del piece.errand.running[wire]
        self._router.change(seat, -piece.size)
        self._count(-piece.size)
        return piece

    def forget(self, errands: Iterable[Errand]) -> None:
        """Nobody waits any more for what runs of these."""
        gone: dict[Seat, list[str]] = {}
        for errand in errands:
            for wire, seat in list(errand.running.items()):
                self._left(seat, wire)
                gone.setdefault(seat, []).append(wire)
        for seat, wires in gone.items():
            seat.replica.forget(wires)

    async def abort_until(self, futures: Sequence[asyncio.Future[Any]], which: Callable[[Piece], bool]) -> None:
        """Abort what runs of `which`, again and again, until the futures are done."""
        while pending := [future for future in futures if not future.done()]:
            chosen = [(seat, [wire for wire, piece in seat.running.items() if which(piece)]) for seat in self._seats]
            aborts = [self._abort(seat, wires) for seat, wires in chosen if wires]
            for outcome in await asyncio.gather(*aborts, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, WorkerDiedError):
                    raise outcome
            await asyncio.wait(pending, timeout=ABORT_AGAIN_S)

    def _abort(self, seat: Seat, wires: Sequence[str]) -> asyncio.Future[None]:
        """Where the replica hangs it is cancelled once that is given up."""
        task = asyncio.ensure_future(seat.replica.abort(wires))
        seat.aborts.add(task)
        task.add_done_callback(seat.aborts.discard)
        return task

    async def abort_all(self) -> None:
        """Cut short whatever runs, until nothing does."""
        while self.num_running:
            self._calm.clear()
            calm = asyncio.ensure_future(self._calm.wait())
            try:
                await self.abort_until([calm], lambda piece: True)
            finally:
                calm.cancel()

    def _count(self, by: int) -> None:
        self.num_running += by
        if not self.num_running:
            self._calm.set()

    async def close(self) -> None:
        """Watch over nobody any more."""
        await self.watch.close()


def _gone(replica: Replica) -> WorkerDiedError:
    return WorkerDiedError(replica.name, 0, "", "", "it is gone", "")
