"""Requests over replicas: who asks for what, and how it goes on when it was cut short.

    ask ──► queue ──► Fleet: a replica draws ──► ended ──► all outputs complete? ──► answer
              ▲                                    │
              └──── cut short, or the replica died: the rest, from the last token that is known

A request for n outputs goes to one replica, which shares the prompt's prefill among them, unless outputs are asked for
one by one. What is cut short goes on output by output. The queue is in order of priority and then of arrival, and what
goes on keeps its place.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

from roll_core.errors import RollError
from roll_core.runtime.rollout.accounts import Accounts
from roll_core.runtime.rollout.drafts import Draft, cut_at
from roll_core.runtime.rollout.errands import Errand, Piece
from roll_core.runtime.rollout.fleet import Fleet
from roll_core.runtime.rollout.liveness import ENDLESS, Watch
from roll_core.runtime.rollout.routing import Router
from roll_core.types import Completion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from roll_core.runtime.rollout.drafts import FindStop
    from roll_core.runtime.rollout.liveness import Patience
    from roll_core.runtime.rollout.replica import Answered, Replica
    from roll_core.runtime.rollout.routing import InLine, Routing
    from roll_core.types import CompletionOutput, GenerateRequest, SamplingParams

    Drawn = Sequence[CompletionOutput | None]
    """Outputs of a request as far as they are drawn; those cut short end in `abort`."""


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
        patience: Patience = ENDLESS,
        outlives_all: Callable[[], bool] = lambda: False,
    ) -> None:
        """`max_running` outputs on a replica at once. `expand` asks for every output by itself, which spreads a group
        over replicas and prefills its prompt on each; so does `max_running`, because a replica does not tell which
        outputs of a group have ended, and what is counted as running for its longest sibling keeps others waiting.
        Every `progress_s` seconds replicas that have work are asked what they have drawn, which is all that is left if
        they die; those that show no sign of life for longer than `patience` allows are given up. 0 never asks.

        Where no replica is left, all requests fail with the death of the last one, unless others will come
        (`outlives_all`): then they wait, and who waits for them hears of it by `nobody_left`.
        """
        self._expand, self._find_stop = expand or max_running is not None, find_stop
        self.accounts = Accounts()
        self._fleet = Fleet(
            Router(routing, max_running),
            self.accounts,
            ended=self._ended,
            lost=self._lost,
            watch=partial(Watch, patience, progress_s),
        )
        self._orders, self._ticks = itertools.count(), itertools.count()
        self._queue: list[InLine] = []
        self._errands: dict[str, Errand] = {}
        self._holds = 0
        self._outlives_all = outlives_all
        self.nobody_left = asyncio.Event()
        """Set while all replicas have died and others are to come."""
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """One more replica."""
        self._fleet.add(replica)
        self.nobody_left.clear()
        self._dispatch()

    def remove(self, replica: Replica) -> None:
        """It is gone; one that had nothing to do may not have been missed. Unknown ones are ignored."""
        self._fleet.remove(replica)

    # -- for those who ask ---------------------------------------------------------------------------------------------

    def ask(
        self,
        requests: Sequence[GenerateRequest],
        answered: Answered,
        drawn: Mapping[str, Drawn] | None = None,
        *,
        only_at: Replica | None = None,
    ) -> None:
        """Have `requests` answered: `answered(id, completion or error)` is called once for each, later.

        `drawn`, by id, is what `take_back` returned of requests that go on. A replica that is asked because it is that
        one (`only_at`) is asked at once, even beyond `max_running`; where it is gone they fail with `WorkerDiedError`.
        """
        for request in requests:
            self.accounts.begin(request.id)
            parts = (drawn or {}).get(request.id, [None] * request.n)
            drafts = [Draft.of(index, part, request.params.max_new_tokens) for index, part in enumerate(parts)]
            errand = Errand(request, next(self._orders), answered, drafts, only_at)
            self._errands[request.id] = errand
            if all(draft.complete for draft in drafts):
                asyncio.get_running_loop().call_soon(self._finish, errand)
            else:
                self._enqueue(errand, [draft for draft in drafts if not draft.complete])
        self._dispatch()

    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        on_completion: Callable[[Completion], None] | None = None,
        *,
        only_at: Replica | None = None,
    ) -> list[Completion]:
        """Answers in the order of `requests`. The first failure is raised as it is, and the others are forgotten."""
        found: dict[str, Completion] = {}
        waiting = {request.id for request in requests}
        done = asyncio.get_running_loop().create_future()

        def answered(id: str, outcome: Completion | BaseException) -> None:
            waiting.discard(id)
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
        self.ask(requests, answered, only_at=only_at)
        waits_for = partial(iter, waiting)
        self.accounts.askers.append(waits_for)
        try:
            await done
        finally:
            self.accounts.askers.remove(waits_for)
            self.forget([request.id for request in requests])
        return [found[request.id] for request in requests]

    def forget(self, ids: Iterable[str]) -> None:
        """Nobody waits for these any more. Unknown ids are ignored."""
        chosen = [self._errands[id] for id in dict.fromkeys(ids) if id in self._errands]
        if not chosen:
            return
        for errand in chosen:
            self._close(errand, "forgotten")
        self._fleet.forget(chosen)
        self._dispatch()

    async def take_back(self, ids: Iterable[str]) -> dict[str, Drawn]:
        """End these now and return what is drawn of each, to be asked again with it. They are not answered; one that
        is answered while it is taken back is not among the results."""
        errands = [self._errands[id] for id in ids if id in self._errands]
        waiting = []
        for errand in errands:
            if errand.recalled is None:
                errand.recalled = asyncio.get_running_loop().create_future()
                if not errand.running:
                    errand.recalled.set_result(None)
            waiting.append(errand.recalled)
        await self._fleet.abort_until(waiting, lambda piece: piece.errand.recalled is not None)
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
            if not in_flight:
                await self._fleet.abort_all()
            with self._fleet.watch.resting():
                yield
        finally:
            self._holds -= 1
            self._dispatch()

    @property
    def end(self) -> BaseException | None:
        """The death of the last replica where none is left; None while there is one, or none has died."""
        return self._fleet.end

    @property
    def num_open(self) -> int:
        """Requests that somebody waits for."""
        return len(self._errands)

    @property
    def num_running(self) -> int:
        """Outputs that replicas are drawing."""
        return self._fleet.num_running

    def check(self) -> None:
        """Raise `RollError` where a request is lost or would count twice.

        Those who ask (`accounts.askers`) wait for just what is open, and each output that is left to draw is in one
        place: in the queue, or at one replica. What is taken back may be in none.
        """
        self.accounts.check()
        places = Counter(draft for *_, piece in self._queue for draft in piece.drafts)
        places.update(draft for piece in self._fleet.pieces() for draft in piece.drafts)
        for id, errand in self._errands.items():
            leaves = errand.recalled is not None or errand.only_at is not None
            for draft in errand.drafts:
                wanted = {0, 1} if leaves else {0} if draft.complete else {1}
                if places[draft] not in wanted:
                    raise RollError(
                        f"the accounts of requests do not agree: output {draft.index} of {id} is"
                        f" {'complete' if draft.complete else 'to be drawn'}, and in {places[draft]} places"
                    )

    async def close(self) -> None:
        """Forget everything."""
        self.forget(list(self._errands))
        await self._fleet.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _enqueue(self, errand: Errand, drafts: Sequence[Draft]) -> None:
        """What is left to draw: together where nothing is drawn yet, so that the prompt is shared."""
        whole = Piece(errand, list(drafts))
        together = whole.is_fresh and not self._expand
        for piece in [whole] if together else [Piece(errand, [draft]) for draft in drafts]:
            heapq.heappush(self._queue, (errand.request.priority, errand.order, next(self._ticks), piece))

    def _dispatch(self) -> None:
        """Let begin what has room. What is asked for at once enters a replica at once."""
        if (death := self._fleet.end) is not None:
            if self._outlives_all():
                self.nobody_left.set()
            else:
                asyncio.get_running_loop().call_soon(self._fail_all, death)
            return
        if self._holds:
            return
        served: int | None = None
        while self._queue:
            priority, *_, piece = in_line = self._queue[0]
            if priority != served:  # those that wait for their replica come before what follows them in the queue
                self._fleet.serve_waiting(priority)
                served = priority
            if not piece.is_unwanted and not self._fleet.accept(in_line):
                break
            heapq.heappop(self._queue)
        self._fleet.serve_waiting()
        self._fleet.enter()

    def _ended(self, piece: Piece, outcome: Completion | BaseException) -> None:
        """A replica has drawn a piece, as far as it was let, or says what is wrong with it."""
        if isinstance(outcome, BaseException):
            self._fail(piece.errand, outcome)
        else:
            self._take(piece, outcome)
        self._dispatch()

    def _lost(self, pieces: Sequence[Piece]) -> None:
        """The replica died where these ran, or would have: they go on elsewhere, from the last token that is known."""
        for piece in pieces:
            for draft, part in zip(piece.drafts, piece.known, strict=False):
                self._extend(draft, part, piece.errand.request.params)
        for piece in pieces:
            self._go_on(piece)
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
            if not errand.running and not errand.recalled.done():
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
            self._fleet.forget([errand])
            errand.answered(errand.request.id, error)

    def _fail_all(self, error: BaseException) -> None:
        for errand in list(self._errands.values()):
            self._fail(errand, error)

    def _close(self, errand: Errand, how: Literal["answered", "failed", "forgotten", "taken_back"]) -> None:
        errand.over = True
        del self._errands[errand.request.id]
        self.accounts.end(errand.request.id, how)
        if errand.recalled is not None and not errand.recalled.done():
            errand.recalled.set_result(None)
