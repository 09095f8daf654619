"""The request queue: runs requests on replicas and continues them after a weight update or a lost replica.

    submit ──► queue ──► ReplicaPool ──► result ──► all outputs complete? ──► PendingRequest.done
                 ▲                         │
                 └── interrupted, or the replica was lost: the rest, from the last known token

A request for n outputs goes to one replica, which computes the prompt once, unless outputs are requested one by one.
Interrupted requests continue output by output. The queue is ordered by priority and then by submission; a continued
request keeps its place.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from roll_core.errors import RollError
from roll_core.runtime.cluster.executors.calls import retrieve
from roll_core.runtime.rollout.replicas import NO_TIMEOUTS, ReplicaPool, Router
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
)
from roll_core.types import Completion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from roll_core.runtime.rollout.replicas import HealthTimeouts, QueueItem, Replica, Routing
    from roll_core.runtime.rollout.requests import FindStop, Outputs
    from roll_core.types import CompletionOutput, GenerateRequest, SamplingParams


class RequestQueue:
    """A queue of requests for the replicas of one engine. Requests submitted in one loop iteration start together."""

    def __init__(
        self,
        replicas: Iterable[Replica],
        *,
        routing: Routing = "least_loaded",
        max_running: int | None = None,
        expand: bool = False,
        find_stop: FindStop | None = None,
        progress_s: float = 0.0,
        timeouts: HealthTimeouts = NO_TIMEOUTS,
        survives_all: Callable[[], bool] = lambda: False,
    ) -> None:
        """At most `max_running` outputs run on a replica.

        `expand` requests each output separately, which spreads a group over replicas and computes its prompt on each.
        `max_running` implies it, since replicas do not report which outputs of a request have ended.

        Busy replicas are polled for progress every `progress_s` seconds (0: never). Reported tokens are kept if the
        replica is lost; a replica without progress for longer than `timeouts` is terminated.

        Once no replica is alive, all requests fail with the last replica's error. If replacements will be added
        (`survives_all`), requests wait instead and `no_replicas` is set.
        """
        self._expand, self._find_stop = expand or max_running is not None, find_stop
        self._pool = ReplicaPool(
            Router(routing, max_running),
            timeouts,
            progress_s,
            on_result=self._result,
            on_lost=self._lost,
        )
        self._orders, self._ticks = itertools.count(), itertools.count()
        self._queue: list[QueueItem] = []
        self._requests: dict[str, PendingRequest] = {}
        self._holds = 0
        self._dispatching = False
        self._survives_all = survives_all
        self.no_replicas = asyncio.Event()
        """Set while no replica is alive and replacements are expected."""
        self.finished: Counter[str] = Counter()
        """Requests so far that were `completed`, `failed` or `cancelled`."""
        for replica in replicas:
            self._pool.add(replica)

    def add(self, replica: Replica) -> None:
        """Add a replica and dispatch queued requests to it."""
        self._pool.add(replica)
        self.no_replicas.clear()
        self._dispatch_soon()

    def remove(self, replica: Replica) -> None:
        """Drop a replica whose worker exited; the exit of an idle one may be unnoticed. Unknown ones are ignored."""
        self._pool.remove(replica)

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self, request: GenerateRequest, sampled: Outputs | None = None, *, replica: Replica | None = None
    ) -> PendingRequest:
        """Queue a request; its `done` future gets the completion. `sampled` outputs are continued.

        A request for a specific `replica` is submitted there even beyond `max_running`. It fails with `WorkerDiedError`
        if the replica is lost.

        Raises `RollError` while another request has the same id.
        """
        if request.id in self._requests:
            raise RollError(f"request {request.id!r} is already pending")
        outputs = [
            PartialOutput.resumed(index, part, request.params.max_new_tokens)
            for index, part in enumerate(sampled or [None] * request.n)
        ]
        loop = asyncio.get_running_loop()
        pending = PendingRequest(request, next(self._orders), outputs, loop.create_future(), replica)
        pending.done.add_done_callback(retrieve)
        self._requests[request.id] = pending
        if all(output.complete for output in outputs):
            loop.call_soon(self._finish, pending)
        else:
            self._enqueue(pending)
        return pending

    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        on_completion: Callable[[Completion], None] | None = None,
        *,
        replica: Replica | None = None,
    ) -> list[Completion]:
        """Run requests and return their completions in order. Raises the first failure and cancels the others."""
        pending: list[PendingRequest] = []
        try:
            for request in requests:
                pending.append(self.submit(request, replica=replica))
                if on_completion is not None:
                    pending[-1].done.add_done_callback(partial(_completed, on_completion))
            return list(await asyncio.gather(*[each.done for each in pending]))
        finally:
            self.cancel(pending)

    def cancel(self, pending: Iterable[PendingRequest]) -> None:
        """End requests whose result is not needed. Finished ones are ignored."""
        chosen = [each for each in pending if each.state is not FINISHED]
        for each in chosen:
            each.done.cancel()
            self._close(each, "cancelled")
        if chosen:
            self._pool.cancel(chosen)
            self._dispatch_soon()

    async def pause(self, pending: Iterable[PendingRequest]) -> None:
        """Interrupt requests, which keep their tokens and wait for `resume`. Some may finish meanwhile."""
        chosen = {each for each in pending if each.wants_tokens}
        for each in chosen:
            each.move(PAUSING if each.state is RUNNING else PAUSED)
        self._queue = [item for item in self._queue if item[-1].parent not in chosen]
        heapq.heapify(self._queue)
        self._pool.drop_waiting(chosen)
        stopped = asyncio.gather(*[each.stopped.wait() for each in chosen if each.state is PAUSING])
        await self._pool.abort_until(stopped, lambda sub: sub.parent.state is PAUSING)

    def resume(self, pending: Iterable[PendingRequest]) -> None:
        """Continue paused requests."""
        for each in pending:
            if each.state is PAUSED:
                each.move(QUEUED)
                self._enqueue(each)

    @asynccontextmanager
    async def paused(self, *, in_flight: bool) -> AsyncIterator[None]:
        """Start no requests in the block, for a weight update. Pauses running requests unless they stay `in_flight`."""
        self._holds += 1
        paused = [] if in_flight else [each for each in self._requests.values() if each.wants_tokens]
        try:
            await self.pause(paused)
            with self._pool.monitor.suspended():
                yield
        finally:
            self._holds -= 1
            self.resume(paused)
            self._dispatch_soon()

    @property
    def error(self) -> BaseException | None:
        """`WorkerDiedError` of the last replica, once no replica is alive; otherwise None."""
        return self._pool.error

    @property
    def num_pending(self) -> int:
        """Number of unfinished requests."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Number of outputs that replicas are running."""
        return self._pool.num_running

    @property
    def num_lost_replicas(self) -> int:
        """Number of replicas lost so far."""
        return self._pool.num_lost

    @property
    def num_continued(self) -> int:
        """Number of interrupted outputs continued so far."""
        return self._pool.num_continued

    async def close(self) -> None:
        """Cancel all requests and stop health checks."""
        self.cancel(list(self._requests.values()))
        await self._pool.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _enqueue(self, pending: PendingRequest, outputs: Sequence[PartialOutput] | None = None) -> None:
        """Queue the incomplete outputs: as one sub-request while no token is sampled, so that they share the prompt."""
        left = [output for output in outputs or pending.outputs if not output.complete]
        whole = SubRequest(pending, left)
        together = whole.is_whole and not self._expand
        for sub in [whole] if together else [SubRequest(pending, [output]) for output in left]:
            heapq.heappush(self._queue, (pending.request.priority, pending.order, next(self._ticks), sub))
        self._dispatch_soon()

    def _dispatch_soon(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Submit queued sub-requests up to capacity; those that were queued together are submitted together."""
        self._dispatching = False
        if (error := self._pool.error) is not None:
            if self._survives_all():
                self.no_replicas.set()
            else:
                for pending in list(self._requests.values()):
                    self._fail(pending, error)
            return
        if self._holds:
            return
        served: int | None = None
        while self._queue:
            priority, *_, sub = item = self._queue[0]
            if priority != served:  # sub-requests that wait for their replica precede the following ones of the queue
                self._pool.accept_waiting(priority)
                served = priority
            if sub.parent.wants_tokens and not self._pool.accept(item):
                break
            heapq.heappop(self._queue)
        self._pool.accept_waiting()
        self._pool.submit_accepted()

    def _result(self, sub: SubRequest, outcome: Completion | BaseException) -> None:
        """Handle a sub-request's result, which an abort may have truncated, or its error."""
        pending = sub.parent
        if isinstance(outcome, BaseException):
            self._fail(pending, outcome)
        else:
            if outcome.prompt_logprobs is not None:
                pending.prompt_logprobs = outcome.prompt_logprobs
            for output, part in zip(sub.outputs, outcome.outputs, strict=True):
                self._extend(output, part, pending.request.params)
            self._continue(sub)
        self._dispatch_soon()

    def _lost(self, subs: Sequence[SubRequest]) -> None:
        """Continue the sub-requests of a lost replica elsewhere, from the last reported token."""
        for sub in subs:
            for output, part in zip(sub.outputs, sub.reported, strict=False):
                self._extend(output, part, sub.parent.request.params)
        for sub in subs:
            self._continue(sub)
        self._dispatch_soon()

    def _extend(self, output: PartialOutput, part: CompletionOutput, params: SamplingParams) -> None:
        seam = output.num_tokens
        output.add(part, params.max_new_tokens)
        if params.stop and seam and self._find_stop is not None and output.sampled is not None:
            found = self._find_stop(output.sampled.token_ids, seam, params.stop)
            if found is not None:
                output.sampled, output.complete = cut_at(output.sampled, *found), True

    def _continue(self, sub: SubRequest) -> None:
        """Finish the request, or queue what the sub-request left incomplete."""
        pending = sub.parent
        if pending.state is FINISHED:
            return
        if all(output.complete for output in pending.outputs):
            self._finish(pending)
        elif pending.wants_tokens and not all(output.complete for output in sub.outputs):
            self._enqueue(pending, sub.outputs)

    def _finish(self, pending: PendingRequest) -> None:
        if pending.state is FINISHED:
            return
        outputs = tuple(output.sampled for output in pending.outputs if output.sampled is not None)
        self._close(pending, "completed")
        if not pending.done.done():
            id = pending.request.id
            pending.done.set_result(Completion(id=id, outputs=outputs, prompt_logprobs=pending.prompt_logprobs))

    def _fail(self, pending: PendingRequest, error: BaseException) -> None:
        if pending.state is not FINISHED:
            self._close(pending, "failed")
            self._pool.cancel([pending])
            if not pending.done.done():
                pending.done.set_exception(error)

    def _close(self, pending: PendingRequest, how: str) -> None:
        pending.move(FINISHED)
        del self._requests[pending.request.id]
        self.finished[how] += 1


def _completed(on_completion: Callable[[Completion], None], done: asyncio.Future[Completion]) -> None:
    if not done.cancelled() and done.exception() is None:
        on_completion(done.result())
