"""The request queue: runs requests on replicas and continues them after a weight update or a lost replica.

    submit ──► queue ──► Router ──► ReplicaSlot: Replica.submit ──► result ──► all outputs complete? ──► done
                 ▲                                                    │
                 └── interrupted, or the replica was lost: the rest, from the last known token

A request for n outputs goes to one replica, which computes the prompt once, unless outputs are requested one by one.
Interrupted requests continue output by output. The queue is ordered by priority and then by submission; a continued
request keeps its place.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from roll_core.errors import RollError, UnsupportedError, WorkerDiedError
from roll_core.runtime.cluster.executors.base import retrieve
from roll_core.runtime.rollout.replicas import ABORT_AGAIN_S, NO_TIMEOUTS, HealthMonitor, ReplicaSlot, Router
from roll_core.runtime.rollout.requests import (
    FINISHED,
    PAUSED,
    PAUSING,
    QUEUED,
    RUNNING,
    PartialOutput,
    PendingRequest,
    SubRequest,
    cut_at,
    rest_of,
)
from roll_core.spec.rollout import MEDIA_KINDS
from roll_core.types import Completion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence

    from roll_core.runtime.rollout.replicas import HealthTimeouts, QueueItem, Replica, Routing
    from roll_core.runtime.rollout.requests import FindStop, Outputs
    from roll_core.types import CompletionOutput, GenerateRequest


class RequestQueue:
    """A queue of requests for the replicas of one engine. Requests submitted in one loop iteration start together."""

    def __init__(
        self,
        replicas: Iterable[Replica],
        *,
        routing: Routing = "least_loaded",
        max_running: int | None = None,
        find_stop: FindStop | None = None,
        progress_s: float = 0.0,
        timeouts: HealthTimeouts = NO_TIMEOUTS,
        survives_all: Callable[[], bool] = lambda: False,
        media: Collection[str] = MEDIA_KINDS,
    ) -> None:
        """At most `max_running` outputs run on a replica.

        With this limit each output is a request of its own, because replicas do not report which outputs of a request
        have ended. A group may then spread over replicas, each of which computes its prompt.

        Replicas are polled for progress every `progress_s` seconds (0: never). Reported tokens are kept if the replica
        is lost; a replica without progress, or an idle one without a reply, for longer than `timeouts` is terminated.

        Once no replica is alive, all requests fail with the last replica's error. If replacements will be added
        (`survives_all`), requests wait instead and `no_replicas` is set.

        Requests with media of other kinds than `media` are refused: the engine would not see them.
        """
        self._media = media
        self._expand, self._find_stop = max_running is not None, find_stop
        self._router = Router(routing, max_running)
        self._monitor = HealthMonitor(timeouts, progress_s, self._terminate)
        self._numbers = itertools.count()
        self._queue: list[QueueItem] = []
        self._requests: dict[str, PendingRequest] = {}
        self._full: set[ReplicaSlot] = set()
        """Slots with sub-requests that wait for their capacity."""
        self._accepted: dict[ReplicaSlot, list[GenerateRequest]] = {}
        """Requests to submit at the end of a dispatch."""
        self._holds = 0
        self._dispatching = False
        self._survives_all = survives_all
        self._last_error: WorkerDiedError | None = None
        self.no_replicas = asyncio.Event()
        """Set while no replica is alive and replacements are expected."""
        self.finished: Counter[str] = Counter()
        """Requests so far that were `completed`, `failed` or `cancelled`."""
        self.has_images = False
        """True once a request had images."""
        self.num_lost_replicas = self.num_continued = 0
        """Numbers of lost replicas, and of interrupted outputs that were continued."""
        for replica in replicas:
            self._router.add(ReplicaSlot(replica, next(self._numbers)))

    def watch(self) -> None:
        """Start health checks of all replicas, whose engines have started. Idle ones are checked too."""
        for slot in self._router.slots.values():
            self._monitor.start(slot)

    def add(self, replica: Replica) -> None:
        """Add a replica and dispatch queued requests to it. Starts its health checks."""
        slot = ReplicaSlot(replica, next(self._numbers))
        self._router.add(slot)
        self._monitor.start(slot)
        self.no_replicas.clear()
        self._dispatch_soon()

    def remove(self, replica: Replica) -> None:
        """Drop a replica whose worker exited; the exit of an idle one may be unnoticed. Unknown ones are ignored."""
        if (slot := self._slot_of(replica)) is not None:
            self._lose(slot, _not_running(replica))

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        request: GenerateRequest,
        sampled: Outputs | None = None,
        *,
        replica: Replica | None = None,
        on_progress: Callable[[Outputs], None] | None = None,
    ) -> PendingRequest:
        """Queue a request; its `done` future gets the completion. `sampled` outputs are continued.

        While it runs, its replica is polled for tokens often if there is an `on_progress`.

        A request for a specific `replica` is submitted there even beyond `max_running`. It fails with `WorkerDiedError`
        if the replica is lost.

        Raises `RollError` while another request has the same id, and `UnsupportedError` for images and videos
        that the engine does not read.
        """
        if unread := next((item.kind for item in request.media if item.kind not in self._media), ""):
            raise UnsupportedError(
                f"request {request.id!r} has {unread}s, but the engine's strategy does not declare the capability"
                f" {unread}s: choose another strategy, or rows and environments of text"
            )
        if request.id in self._requests:
            raise RollError(f"request {request.id!r} is already pending: request ids must be unique")
        outputs = [PartialOutput(index) for index in range(request.n)]
        for output, part in zip(outputs, sampled or (), strict=False):
            if part is not None:
                output.add(part, request.params.max_new_tokens)
        loop = asyncio.get_running_loop()
        pending = PendingRequest(request, next(self._numbers), outputs, loop.create_future(), replica)
        pending.on_progress = on_progress
        pending.done.add_done_callback(retrieve)
        self._requests[request.id] = pending
        self.has_images = self.has_images or bool(request.media)
        if all(output.complete for output in outputs):
            # Later: the caller has no `pending` yet whose result it could await.
            loop.call_soon(self._continue, pending, outputs)
        else:
            self._enqueue(pending, outputs)
        return pending

    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        replica: Replica | None = None,
    ) -> list[Completion]:
        """Run requests and return their completions in order. Raises the first failure and cancels the others."""
        pending: list[PendingRequest] = []
        try:
            for request in requests:
                pending.append(self.submit(request, replica=replica))
            return list(await asyncio.gather(*[request.done for request in pending]))
        finally:
            self.cancel(pending)

    def cancel(self, pending: Iterable[PendingRequest]) -> None:
        """End requests whose result is not needed. Finished ones are ignored."""
        chosen = [request for request in pending if request.state is not FINISHED]
        for request in chosen:
            request.done.cancel()
            self._close(request, "cancelled")
        if chosen:
            self._cancel_running(chosen)
            self._dispatch_soon()

    async def pause(self, pending: Iterable[PendingRequest]) -> None:
        """Interrupt requests, which keep their tokens and wait for `resume`. Some may finish meanwhile."""
        chosen = {request for request in pending if request.wants_tokens}
        for request in chosen:
            request.move(PAUSING if request.state is RUNNING else PAUSED)
        self._queue = _without(self._queue, chosen)
        for slot in self._full:
            slot.waiting = _without(slot.waiting, chosen)
        stopped = asyncio.gather(*[request.stopped.wait() for request in chosen if request.state is PAUSING])
        stopped.add_done_callback(retrieve)
        try:
            await asyncio.sleep(0)
            while not stopped.done():
                await self._abort_pausing()
                await asyncio.wait([stopped], timeout=ABORT_AGAIN_S)
        finally:
            stopped.cancel()

    def resume(self, pending: Iterable[PendingRequest]) -> None:
        """Continue paused requests. If their `pause` did not end, running outputs stay where they are."""
        for request in pending:
            if request.state in (PAUSED, PAUSING):
                request.move(QUEUED if request.state is PAUSED else RUNNING)
                self._enqueue(request, request.interrupted)

    @asynccontextmanager
    async def paused(self, *, in_flight: bool) -> AsyncIterator[None]:
        """Start no requests in the block, for a weight update. Pauses running requests unless they stay `in_flight`."""
        # Before the pause: `_dispatch` must not fill the places of interrupted requests while weights change.
        self._holds += 1
        paused = [] if in_flight else [request for request in self._requests.values() if request.wants_tokens]
        try:
            await self.pause(paused)
            # Not around `pause`: without its timeouts, the pause would wait for a hanging replica without end.
            with self._monitor.suspended():
                yield
        finally:
            self._holds -= 1
            self.resume(paused)
            self._dispatch_soon()

    async def drained(self) -> None:
        """Wait until no request is unfinished and the callers of finished ones have continued."""
        while True:
            while self._requests:
                await asyncio.wait([request.done for request in self._requests.values()])
            # A caller whose request is done may submit its next one, but only once the loop has resumed it.
            await asyncio.sleep(0)
            if not self._requests:
                return

    @property
    def error(self) -> WorkerDiedError | None:
        """`WorkerDiedError` of the last replica, once no replica is alive; otherwise None."""
        return None if self._router.slots else self._last_error

    @property
    def timeouts(self) -> HealthTimeouts:
        """Timeouts of the replicas' health checks."""
        return self._monitor.timeouts

    @property
    def num_pending(self) -> int:
        """Number of unfinished requests."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Number of outputs that replicas are running."""
        return sum(slot.load for slot in self._router.slots.values())

    async def close(self) -> None:
        """Cancel all requests and stop health checks."""
        self.cancel(list(self._requests.values()))
        await self._monitor.close()

    # -- dispatch ------------------------------------------------------------------------------------------------------

    def _enqueue(self, pending: PendingRequest, outputs: Sequence[PartialOutput]) -> None:
        """Queue the incomplete outputs: as one sub-request while no token is sampled, so that they share the prompt."""
        left = [output for output in outputs if not output.complete]
        combined = SubRequest(pending, left)
        together = combined.is_whole and not self._expand
        for sub in [combined] if together else [SubRequest(pending, [output]) for output in left]:
            # The number is unique, so that the heap never compares two sub-requests, which have no order.
            heapq.heappush(self._queue, (pending.request.priority, pending.order, next(self._numbers), sub))
        self._dispatch_soon()

    def _dispatch_soon(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Submit queued sub-requests up to capacity; those that were queued together are submitted together."""
        self._dispatching = False
        if (error := self.error) is not None:
            survives = self._survives_all()
            for pending in list(self._requests.values()):
                if not survives or pending.replica is not None:
                    self._fail(pending, error)
            if survives:
                self.no_replicas.set()
            return
        # After the check for an error: without a replica, requests fail even during a weight update.
        if self._holds:
            return
        served: int | None = None
        while self._queue:
            priority, *_, sub = item = self._queue[0]
            if priority != served:  # sub-requests that wait for their replica precede the following ones of the queue
                self._accept_waiting(priority)
                served = priority
            # A cancelled request stays in the heap, where removing it would cost a search, and is dropped here.
            if sub.parent.wants_tokens and not self._accept(item):
                break
            heapq.heappop(self._queue)
        self._accept_waiting()
        accepted, self._accepted = self._accepted, {}
        for slot, requests in accepted.items():
            slot.replica.submit(requests, partial(self._on_result, slot))
            self._monitor.start(slot)

    def _accept(self, item: QueueItem) -> bool:
        """Accept a sub-request, or queue it for its only replica. False if no replica has capacity."""
        sub = item[-1]
        if (replica := sub.parent.replica) is not None:
            slot = self._slot_of(replica)
            if slot is None:
                error = self._last_error or _not_running(replica)
                asyncio.get_running_loop().call_soon(self._fail, sub.parent, error)
            else:
                self._place(slot, sub)
            return True
        slot = self._router.choose(sub.parent.request.routing_key or sub.parent.request.id)
        if slot is None:
            return False
        if self._router.has_capacity(slot):
            self._place(slot, sub)
        else:
            heapq.heappush(slot.waiting, item)
            self._full.add(slot)
        return True

    def _accept_waiting(self, priority: float = math.inf) -> None:
        """Accept sub-requests down to this priority that wait for a certain replica, where it has capacity now."""
        for slot in list(self._full):
            while slot.waiting and slot.waiting[0][0] <= priority and self._router.has_capacity(slot):
                self._place(slot, heapq.heappop(slot.waiting)[-1])
            if not slot.waiting:
                self._full.discard(slot)

    def _place(self, slot: ReplicaSlot, sub: SubRequest) -> None:
        # It was cancelled while it waited for this replica's capacity.
        if not sub.parent.wants_tokens:
            return
        self.num_continued += sub.outputs[0].num_tokens > 0
        request = sub.parent.request
        if not sub.is_whole:
            output = sub.outputs[0]
            request = rest_of(request, output, f"{request.id}#{output.index}.{next(self._numbers)}")
        # The last heartbeat of an idle replica may be old: its first token gets the full timeout.
        if not slot.running:
            self._monitor.heartbeat(slot)
        slot.running[request.id] = sub
        sub.parent.started(request.id, slot)
        self._router.change(slot, len(sub.outputs))
        self._accepted.setdefault(slot, []).append(request)

    # -- results -------------------------------------------------------------------------------------------------------

    def _on_result(self, slot: ReplicaSlot, id: str, outcome: Completion | BaseException) -> None:
        """Handle a replica's result, which an abort may have truncated, or its error.

        Late results of cancelled or re-routed sub-requests are ignored.
        """
        if id not in slot.running:
            return
        if isinstance(outcome, WorkerDiedError):
            self._lose(slot, outcome)
            return
        self._monitor.heartbeat(slot)
        sub = self._release(slot, id)
        pending = sub.parent
        if isinstance(outcome, BaseException):
            self._fail(pending, outcome)
        else:
            if outcome.prompt_logprobs is not None:
                pending.prompt_logprobs, pending.prompt_topk = outcome.prompt_logprobs, outcome.prompt_topk
            self._extend(sub, outcome.outputs)
            self._continue(pending, sub.outputs)
        self._dispatch_soon()

    def _lose(self, slot: ReplicaSlot, error: WorkerDiedError) -> None:
        """Remove a lost replica. Requests for this replica fail; the others continue elsewhere."""
        if not slot.alive:
            return
        self._router.remove(slot)
        self._full.discard(slot)
        self.num_lost_replicas += 1
        self._last_error = error
        # Emptied before anything else: results that still arrive then find no sub-request and are ignored.
        running, slot.running = slot.running, {}
        for id, sub in running.items():
            sub.parent.returned(id)
        # `pause` awaits these calls, which a lost worker never answers.
        for abort in slot.aborts:
            abort.cancel()
        lost = [*running.values(), *(sub for *_, sub in slot.waiting)]
        self._lost([sub for sub in lost if sub.parent.replica is None])
        for sub in lost:
            if sub.parent.replica is not None:
                self._fail(sub.parent, error)
        self._dispatch_soon()

    def _lost(self, subs: Sequence[SubRequest]) -> None:
        """Continue the sub-requests of a lost replica elsewhere, from the last reported token.

        Prompt logprobs are not reported and come only with a whole request, which therefore begins again.
        """
        for sub in subs:
            if not sub.parent.request.prompt_logprobs or sub.parent.prompt_logprobs is not None:
                self._extend(sub, sub.reported)
        for sub in subs:
            self._continue(sub.parent, sub.outputs)

    async def _terminate(self, slot: ReplicaSlot, why: str) -> None:
        self._lose(slot, await slot.replica.terminate(why))

    def _release(self, slot: ReplicaSlot, id: str) -> SubRequest:
        sub = slot.running.pop(id)
        sub.parent.returned(id)
        self._router.change(slot, -len(sub.outputs))
        return sub

    def _cancel_running(self, requests: Iterable[PendingRequest]) -> None:
        """Cancel the running sub-requests of finished requests."""
        cancelled: dict[ReplicaSlot, list[str]] = {}
        for request in requests:
            for id, slot in list(request.running.items()):
                self._release(slot, id)
                cancelled.setdefault(slot, []).append(id)
        for slot, ids in cancelled.items():
            slot.replica.cancel(ids)

    async def _abort_pausing(self) -> None:
        """Abort the running sub-requests of pausing requests. An abort is cancelled if its replica is lost."""
        aborts = []
        for slot in self._router.slots.values():
            if ids := [id for id, sub in slot.running.items() if sub.parent.state is PAUSING]:
                abort = asyncio.ensure_future(slot.replica.abort(ids))
                slot.aborts.add(abort)
                abort.add_done_callback(slot.aborts.discard)
                aborts.append(abort)
        for outcome in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, WorkerDiedError):
                raise outcome

    def _extend(self, sub: SubRequest, parts: Sequence[CompletionOutput]) -> None:
        """Append newly sampled tokens to the outputs of a sub-request; `parts` may be empty."""
        params = sub.parent.request.params
        for output, part in zip(sub.outputs, parts, strict=False):
            seam = output.num_tokens
            output.add(part, params.max_new_tokens)
            # The engine finds stop strings within what it samples, but not one that begins before the interruption.
            stops = () if params.ignore_eos else params.stop
            if stops and seam and self._find_stop is not None and output.sampled is not None:
                stop = self._find_stop(output.sampled.token_ids, seam, stops)
                if stop is not None and stop[0] > params.min_new_tokens:
                    output.sampled, output.complete = cut_at(output.sampled, *stop), True

    def _continue(self, pending: PendingRequest, outputs: Sequence[PartialOutput]) -> None:
        """Finish the request, or queue those of `outputs` that are incomplete."""
        if pending.state is FINISHED:
            return
        if all(output.complete for output in pending.outputs):
            self._close(pending, "completed")
            # A caller that was cancelled while it awaited the result has cancelled the future, too.
            if not pending.done.done():
                sampled = tuple(output.sampled for output in pending.outputs if output.sampled is not None)
                completion = Completion(
                    id=pending.request.id,
                    outputs=sampled,
                    prompt_logprobs=pending.prompt_logprobs,
                    prompt_topk=pending.prompt_topk,
                )
                pending.done.set_result(completion)
        elif pending.wants_tokens and not all(output.complete for output in outputs):
            self._enqueue(pending, outputs)

    def _fail(self, pending: PendingRequest, error: BaseException) -> None:
        if pending.state is not FINISHED:
            self._close(pending, "failed")
            self._cancel_running([pending])
            if not pending.done.done():
                pending.done.set_exception(error)

    def _close(self, pending: PendingRequest, how: str) -> None:
        pending.move(FINISHED)
        del self._requests[pending.request.id]
        self.finished[how] += 1

    def _slot_of(self, replica: object) -> ReplicaSlot | None:
        return next((slot for slot in self._router.slots.values() if slot.replica is replica), None)


def _without(items: list[QueueItem], requests: set[PendingRequest]) -> list[QueueItem]:
    """A heap of `items` without sub-requests of these requests."""
    left = [item for item in items if item[-1].parent not in requests]
    heapq.heapify(left)
    return left


def _not_running(replica: Any) -> WorkerDiedError:
    return WorkerDiedError(replica.name, 0, "", "", "it is no longer running", "")
