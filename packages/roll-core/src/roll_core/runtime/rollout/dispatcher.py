"""Requests over replicas: who draws what, what happens when weights change or a replica dies.

    ask ──► queue ──► router ──► Replica.begin ──► answered ──► all outputs complete? ──► answer
              ▲                                       │
              └───────── cut short, or the replica died: the rest, from the last token that is known

A request for n outputs goes to one replica, which shares the prompt's prefill among them. What is cut short goes on
output by output. The queue is in order of arrival, and what goes on keeps its place.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from roll_core.errors import RollError, WorkerDiedError
from roll_core.runtime.rollout.accounts import Accounts
from roll_core.runtime.rollout.drafts import Draft, cut_at, rest_of
from roll_core.runtime.rollout.errands import Errand, Piece
from roll_core.runtime.rollout.routing import Router, Seat
from roll_core.types import Completion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from roll_core.runtime.rollout.drafts import FindStop
    from roll_core.runtime.rollout.replica import Answered, Replica
    from roll_core.runtime.rollout.routing import Routing
    from roll_core.types import CompletionOutput, GenerateRequest, SamplingParams

    Drawn = Sequence[CompletionOutput | None]
    """Outputs of a request as far as they are drawn; those cut short end in `abort`."""

log = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.5
"""An abort may overtake the request that it is to end, and is then asked again."""


class Dispatcher:
    """Owned by one event loop. `answered` callbacks are called on it, and may ask for more."""

    def __init__(
        self,
        replicas: Iterable[Replica],
        *,
        routing: Routing = "least_loaded",
        max_running: int | None = None,
        expand: bool = False,
        find_stop: FindStop | None = None,
        progress_s: float = 0.0,
    ) -> None:
        """`max_running` outputs on a replica at once. `expand` asks for every output by itself, which spreads a group
        over replicas and prefills its prompt on each. Every `progress_s` seconds replicas are asked what they have
        drawn, which is all that is left if they die; 0 never asks."""
        self._router = Router(routing, max_running)
        self._expand, self._find_stop, self._progress_s = expand, find_stop, progress_s
        self._seats: list[Seat] = []
        self._numbers, self._orders, self._attempts = itertools.count(), itertools.count(), itertools.count()
        self._queue: list[tuple[int, int, int, Piece]] = []
        self._errands: dict[str, Errand] = {}
        self._holds = 0
        self._starved: set[Seat] = set()
        """Those with something that will run there and nowhere else."""
        self.num_running = 0
        """Outputs that replicas are drawing."""
        self._calm = asyncio.Event()
        """Set when nothing runs any more."""
        self._death: BaseException | None = None
        """Of the replica that died last."""
        self._poll: asyncio.Task[None] | None = None
        self.accounts = Accounts()
        for replica in replicas:
            self.add(replica)

    # -- for those who ask ---------------------------------------------------------------------------------------------

    def ask(
        self, requests: Sequence[GenerateRequest], answered: Answered, drawn: Mapping[str, Drawn] | None = None
    ) -> None:
        """Have `requests` answered: `answered(id, completion or error)` is called once for each, later.

        `drawn`, by id, is what `take_back` returned of requests that go on.
        """
        for request in requests:
            self.accounts.begin(request.id)
            parts = (drawn or {}).get(request.id, [None] * request.n)
            drafts = [
                Draft(index, part, part is not None and part.finish_reason != "abort")
                for index, part in enumerate(parts)
            ]
            errand = Errand(request, next(self._orders), answered, drafts)
            self._errands[request.id] = errand
            if all(draft.complete for draft in drafts):
                asyncio.get_running_loop().call_soon(self._finish, errand)
            else:
                self._enqueue(errand, [draft for draft in drafts if not draft.complete])
        self._dispatch()

    async def generate(
        self, requests: Sequence[GenerateRequest], on_completion: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Answers in the order of `requests`. The first failure is raised as it is, and the others are forgotten."""
        found: dict[str, Completion] = {}
        done = asyncio.get_running_loop().create_future()

        def answered(id: str, outcome: Completion | BaseException) -> None:
            if done.done():
                return
            if isinstance(outcome, BaseException):
                done.set_exception(outcome)
                return
            found[id] = outcome
            if on_completion is not None:
                on_completion(outcome)
            if len(found) == len(requests):
                done.set_result(None)

        if not requests:
            return []
        self.ask(requests, answered)
        try:
            await done
        finally:
            self.forget([request.id for request in requests])
        return [found[request.id] for request in requests]

    def forget(self, ids: Iterable[str]) -> None:
        """Nobody waits for these any more. Unknown ids are ignored."""
        chosen = {id for id in ids if id in self._errands}
        if not chosen:
            return
        for id in chosen:
            self._close(self._errands[id], "forgotten")
        self._end_orphans()
        self._dispatch()

    async def take_back(self, ids: Iterable[str]) -> dict[str, Drawn]:
        """End these now and return what is drawn of each, to be asked again with it. They are not answered; one that
        is answered while it is taken back is not among the results."""
        errands = [self._errands[id] for id in ids if id in self._errands]
        waiting = []
        for errand in errands:
            if errand.recalled is None:
                errand.recalled = asyncio.get_running_loop().create_future()
                if not errand.pieces:
                    errand.recalled.set_result(None)
            waiting.append(errand.recalled)
        await self._abort_until(waiting, lambda piece: piece.errand.recalled is not None)
        taken: dict[str, Drawn] = {}
        for errand in errands:
            if not errand.over:
                self._close(errand, "taken_back")
                taken[errand.request.id] = [draft.drawn for draft in errand.drafts]
        self._dispatch()
        return taken

    @asynccontextmanager
    async def paused(self, *, in_flight: bool) -> AsyncIterator[None]:
        """Weights are replaced inside: nothing begins. Unless requests may stay `in_flight` they are cut short before,
        and go on afterwards from their last token."""
        self._holds += 1
        try:
            while not in_flight and self.num_running:
                self._calm.clear()
                calm = asyncio.ensure_future(self._calm.wait())
                try:
                    await self._abort_until([calm], lambda piece: True)
                finally:
                    calm.cancel()
            yield
        finally:
            self._holds -= 1
            self._dispatch()

    @property
    def num_open(self) -> int:
        """Requests that somebody waits for."""
        return len(self._errands)

    async def close(self) -> None:
        """Forget everything."""
        self.forget(list(self._errands))
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)

    # -- replicas ------------------------------------------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """One more."""
        seat = Seat(replica, next(self._numbers))
        self._seats.append(seat)
        self._router.add(seat)
        self._dispatch()

    def remove(self, replica: Replica) -> None:
        """It is gone; one that had nothing to do may not have been missed. Unknown ones are ignored."""
        for seat in self._seats:
            if seat.replica is replica:
                self._lost(seat, WorkerDiedError(replica.name, 0, "", "", "it is gone", ""))
                self._dispatch()
                return

    def _lost(self, seat: Seat, error: WorkerDiedError) -> None:
        """Everything that ran there goes on elsewhere, from the last token that is known."""
        if not seat.alive:
            return
        self._router.remove(seat)
        self._seats.remove(seat)
        self._starved.discard(seat)
        self._count(-seat.load)
        self.accounts.lost_replicas += 1
        pieces, seat.running = list(seat.running.values()), {}
        for piece in pieces:
            piece.errand.pieces -= 1
            for at, part in piece.known.items():
                self._extend(piece.drafts[at], part, piece.errand.request.params)
        for piece in [*pieces, *seat.waiting]:
            self._go_on(piece)
        self._death = error

    def _fail_all(self, error: BaseException) -> None:
        for errand in list(self._errands.values()):
            self._fail(errand, error)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _enqueue(self, errand: Errand, drafts: Sequence[Draft]) -> None:
        """What is left to draw: together where nothing is drawn yet, so that the prompt is shared."""
        whole = Piece(errand, list(drafts))
        together = whole.is_fresh and not self._expand
        for piece in [whole] if together else [Piece(errand, [draft]) for draft in drafts]:
            heapq.heappush(self._queue, (errand.request.priority, errand.order, next(self._attempts), piece))

    def _dispatch(self) -> None:
        """Let begin what has room. What is asked for at once enters a replica at once."""
        if self._death is not None and not self._seats:
            # Nobody is left to answer.
            asyncio.get_running_loop().call_soon(self._fail_all, self._death)
            return
        if self._holds:
            return
        chosen: dict[Seat, list[GenerateRequest]] = {}
        for seat in list(self._starved):
            while seat.waiting and self._router.has_room(seat, seat.waiting[0].size):
                self._begin(seat, seat.waiting.popleft(), chosen)
            if not seat.waiting:
                self._starved.discard(seat)
        while self._queue:
            piece = self._queue[0][-1]
            if not piece.errand.over and piece.errand.recalled is None:
                found = self._router.choose(piece.errand.request.id, piece.size)
                home = self._router.home(piece.errand.request.id) if found is None else None
                if found is not None:
                    self._begin(found, piece, chosen)
                elif home is not None:
                    home.waiting.append(piece)
                    self._starved.add(home)
                else:
                    break
            heapq.heappop(self._queue)
        for seat, requests in chosen.items():
            self._start(seat, requests)

    def _begin(self, seat: Seat, piece: Piece, chosen: dict[Seat, list[GenerateRequest]]) -> None:
        errand = piece.errand
        if errand.over or errand.recalled is not None:
            return
        request = errand.request
        if not piece.is_fresh:
            draft = piece.drafts[0]
            self.accounts.continued += draft.num_tokens > 0
            request = rest_of(request, draft, f"{request.id}#{draft.index}.{next(self._attempts)}")
        seat.running[request.id] = piece
        errand.pieces += 1
        self._router.change(seat, piece.size)
        self._count(piece.size)
        chosen.setdefault(seat, []).append(request)

    def _start(self, seat: Seat, requests: Sequence[GenerateRequest]) -> None:
        seat.replica.begin(requests, lambda id, outcome: self._answered(seat, id, outcome))
        if self._progress_s and (self._poll is None or self._poll.done()):
            self._poll = asyncio.ensure_future(self._watch_progress())

    def _answered(self, seat: Seat, wire: str, outcome: Completion | BaseException) -> None:
        """A replica says how a piece ended. News of what was forgotten, or lost before, is no news."""
        if wire not in seat.running:
            return
        if isinstance(outcome, WorkerDiedError):
            self._lost(seat, outcome)
            self._dispatch()
            return
        piece = self._left(seat, wire)
        errand = piece.errand
        if isinstance(outcome, BaseException):
            self._fail(errand, outcome)
        else:
            self._take(piece, outcome)
        self._dispatch()

    def _take(self, piece: Piece, completion: Completion) -> None:
        errand = piece.errand
        if completion.prompt_logprobs is not None:
            errand.prompt_logprobs = completion.prompt_logprobs
        for draft, part in zip(piece.drafts, completion.outputs, strict=True):
            self._extend(draft, part, errand.request.params)
        self._go_on(piece)

    def _extend(self, draft: Draft, part: CompletionOutput, params: SamplingParams) -> None:
        seam = draft.num_tokens
        draft.add(part, params.max_new_tokens)
        if params.stop and seam and self._find_stop is not None and draft.drawn is not None:
            found = self._find_stop(draft.drawn.token_ids, seam, params.stop)
            if found is not None:
                draft.drawn, draft.complete = cut_at(draft.drawn, *found), True

    def _go_on(self, piece: Piece) -> None:
        """With what is left of a piece that does not run any more."""
        errand = piece.errand
        if errand.over:
            return
        left = [draft for draft in piece.drafts if not draft.complete]
        if errand.recalled is not None:
            if not errand.pieces and not errand.recalled.done():
                errand.recalled.set_result(None)
        elif left:
            self._enqueue(errand, left)
        elif all(draft.complete for draft in errand.drafts):
            self._finish(errand)

    def _finish(self, errand: Errand) -> None:
        if errand.over:
            return
        outputs = tuple(draft.drawn for draft in errand.drafts if draft.drawn is not None)
        self._close(errand, "answered")
        errand.answered(
            errand.request.id,
            Completion(id=errand.request.id, outputs=outputs, prompt_logprobs=errand.prompt_logprobs),
        )

    def _fail(self, errand: Errand, error: BaseException) -> None:
        if not errand.over:
            self._close(errand, "failed")
            self._end_orphans()
            errand.answered(errand.request.id, error)

    def _close(self, errand: Errand, how: Literal["answered", "failed", "forgotten", "taken_back"]) -> None:
        errand.over = True
        del self._errands[errand.request.id]
        self.accounts.end(errand.request.id, how)
        if errand.recalled is not None and not errand.recalled.done():
            errand.recalled.set_result(None)

    def _left(self, seat: Seat, wire: str) -> Piece:
        piece: Piece = seat.running.pop(wire)
        piece.errand.pieces -= 1
        self._router.change(seat, -piece.size)
        self._count(-piece.size)
        return piece

    def _end_orphans(self) -> None:
        """Nobody waits any more for some of what runs."""
        for seat in self._seats:
            gone = [wire for wire, piece in seat.running.items() if piece.errand.over]
            for wire in gone:
                self._left(seat, wire)
            if gone:
                seat.replica.forget(gone)

    def _count(self, by: int) -> None:
        self.num_running += by
        if not self.num_running:
            self._calm.set()

    async def _abort_until(self, futures: Sequence[asyncio.Future[Any]], which: Callable[[Piece], bool]) -> None:
        """Abort what runs of `which`, again and again, until the futures are done."""
        while pending := [future for future in futures if not future.done()]:
            chosen = [(seat, [wire for wire, piece in seat.running.items() if which(piece)]) for seat in self._seats]
            aborts = [asyncio.ensure_future(seat.replica.abort(wires)) for seat, wires in chosen if wires]
            for outcome in await asyncio.gather(*aborts, return_exceptions=True):
                if isinstance(outcome, BaseException) and not isinstance(outcome, WorkerDiedError):
                    raise outcome
            await asyncio.wait(pending, timeout=ABORT_AGAIN_S)

    async def _watch_progress(self) -> None:
        while self._errands:
            await asyncio.sleep(self._progress_s)
            for seat in list(self._seats):
                try:
                    told = await seat.replica.progress()
                except RollError as error:  # if it died, every request that ran there is answered with that
                    log.debug("%s did not tell its progress: %s", seat.replica.name, error)
                    continue
                for completion in told:
                    piece = seat.running.get(completion.id)
                    if piece is not None:
                        piece.known = dict(enumerate(completion.outputs))
