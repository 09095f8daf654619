"""Replicas of an engine: routing of sub-requests and health checks.

    RequestQueue ── Router.choose ──► ReplicaSlot: Replica.submit ──► result, or the replica exited
    HealthMonitor ── progress() of each slot ──► busy: more tokens? idle: a reply? ── none for too long ──► terminate

Everything here runs on one event loop and does not depend on an engine: replicas are workers of a role, or simulated.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from roll_core.errors import InvalidCompletionError, RollError, WorkerDiedError
from roll_core.runtime.cluster.concurrency import background, cancel_all
from roll_core.runtime.cluster.executors.base import WorkerStub, retrieve
from roll_core.runtime.records.tracking import TRACE
from roll_core.runtime.workers.infer import InferWorker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from typing import TypeAlias

    from roll_core.runtime.cluster.executors.base import WorkerGroup
    from roll_core.runtime.rollout.requests import SubRequest
    from roll_core.types import Completion, GenerateRequest

    OnResult: TypeAlias = Callable[[str, Completion | BaseException], None]
    """Receives the id of a request and its completion or error: `WorkerDiedError` if the replica is lost, another error
    if the request itself failed."""
    QueueItem: TypeAlias = tuple[int, int, int, SubRequest]
    """Priority, order of submission, a unique number, and the sub-request."""

Routing = Literal["least_loaded", "prompt_affinity", "sticky"]
"""`least_loaded`: the replica with the fewest running outputs. `prompt_affinity`: the replica that had the routing key
before, whose prefix cache may contain the prompt, unless it is full or far busier than another. `sticky`: that replica,
even if the request must wait for capacity."""

log = logging.getLogger(__name__)

REMEMBERED = 1 << 16
"""Routing keys whose replica is remembered; the least recently used are dropped first."""
BUSIER_BY, BUSIER_TIMES = 64, 1.5
"""A replica is far busier than another if it has more outputs by this difference and by this factor. Same rule as in
SGLang's router (`cache_aware`: balance_abs_threshold, balance_rel_threshold)."""
ABORT_AGAIN_S = 0.5
"""Seconds between repeated aborts: an abort may overtake the request that it should end."""
NO_DEADLINE = math.inf
"""Calls of replicas have no deadline: a busy engine queues requests, and the health monitor detects hangs."""
POLLS = 4
"""A progress poll times out after `replica_timeout / POLLS`, since engines report only between two steps."""
PAUSES = 20
"""Pause between two polls, in multiples of the last poll's duration. Progress of a full engine is a large payload."""
STREAM_S, STREAM_PAUSES = 0.05, 4
"""Seconds between two polls of a replica with streamed requests, and their `PAUSES`."""


class Replica(ABC):
    """One engine that samples tokens. All calls happen on one event loop."""

    name: str
    """Name of the replica, for messages."""

    @abstractmethod
    def submit(self, requests: Sequence[GenerateRequest], on_result: OnResult) -> None:
        """Submit `requests` together. `on_result` is called once for each that is not cancelled, later and never from
        within this call."""

    @abstractmethod
    async def abort(self, ids: Sequence[str]) -> None:
        """End requests with the tokens that they have (`finish_reason == "abort"`), which become their results. A
        request that has not arrived yet may be missed: callers repeat the abort."""

    @abstractmethod
    def cancel(self, ids: Sequence[str]) -> None:
        """End requests without a result."""

    @abstractmethod
    async def progress(self) -> list[Completion] | None:
        """Tokens that the running requests have so far; None if the engine does not report any. They are kept if the
        replica is lost, and serve as its heartbeat."""

    @abstractmethod
    async def terminate(self, why: str) -> WorkerDiedError:
        """End a replica that timed out. Returns its error; results of its requests are no longer delivered."""


class WorkerReplica(Replica):
    """One rank of a group of `InferWorker`s, behind any executor."""

    def __init__(self, group: WorkerGroup, rank: int) -> None:
        self.name = f"{group.role} rank {rank}"
        self._group, self._rank = group, rank
        self._workers = WorkerStub[InferWorker](group)
        self._submitting: set[asyncio.Future[None]] = set()
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._cancelling: set[asyncio.Task[None]] = set()

    @override
    def submit(self, requests: Sequence[GenerateRequest], on_result: OnResult) -> None:
        submitting = asyncio.ensure_future(
            self._workers(InferWorker.submit, NO_DEADLINE).at(self._rank, list(requests))
        )
        self._submitting.add(submitting)
        submitting.add_done_callback(self._submitting.discard)
        submitting.add_done_callback(retrieve)
        for request in requests:
            waiting = self._wait(submitting, request.id, on_result)
            self._waiting[request.id] = background(waiting, name=f"{self.name}: result of {request.id}")

    async def _wait(self, submitting: asyncio.Future[None], id: str, on_result: OnResult) -> None:
        outcome: Completion | BaseException
        try:
            # All requests of the call share it: cancelling one of them must not cancel the submission.
            await asyncio.shield(submitting)
            outcome = await self._workers(InferWorker.result, NO_DEADLINE).at(self._rank, id)
        except Exception as error:  # the queue decides what it means
            outcome = error
        # `cancel` may have removed it meanwhile, and a new request may have its id.
        if self._waiting.get(id) is asyncio.current_task():
            del self._waiting[id]
        on_result(id, outcome)

    @override
    async def abort(self, ids: Sequence[str]) -> None:
        # A worker can only abort what it has received.
        if self._submitting:
            await asyncio.wait(list(self._submitting))
        await self._workers(InferWorker.abort, NO_DEADLINE).at(self._rank, list(ids))

    @override
    async def progress(self) -> list[Completion] | None:
        return await self._workers(InferWorker.progress, NO_DEADLINE).at(self._rank)

    @override
    async def terminate(self, why: str) -> WorkerDiedError:
        error = await self._group.kill(self._rank, why)
        waiting, self._waiting = self._waiting, {}
        for task in (*waiting.values(), *self._submitting):
            task.cancel()
        return error

    @override
    def cancel(self, ids: Sequence[str]) -> None:
        for id in ids:
            if (waiting := self._waiting.pop(id, None)) is not None:
                waiting.cancel()
        task = background(self._cancel(list(ids)), name=f"{self.name}: cancel")
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def _cancel(self, ids: Sequence[str]) -> None:
        try:  # calls keep their order: this one follows the requests' own submission and precedes later ones
            await self._workers(InferWorker.forget).at(self._rank, ids)
        except RollError as error:  # the worker exited or the run ends, which cancels the requests too
            log.debug("%s: %s", self.name, error)


@dataclass(eq=False, slots=True)
class ReplicaSlot:
    """A live replica with its running and waiting sub-requests."""

    replica: Replica
    number: int
    """Index in order of addition. Ties go to the lower number, so that routing is deterministic."""
    running: dict[str, SubRequest] = field(default_factory=dict)
    """Running sub-requests by the request id that the replica received."""
    load: int = 0
    """Number of running outputs."""
    waiting: list[QueueItem] = field(default_factory=list)
    """A heap of sub-requests that must run here."""
    aborts: set[asyncio.Future[None]] = field(default_factory=set)
    """Abort calls in progress."""
    alive: bool = True
    heartbeat_at: float = 0.0
    """Loop time of its last heartbeat, or of its first work since it was idle."""
    silent_s: float = 0.0
    """Observed time without a heartbeat."""
    reports: bool = True
    """False if its engine does not report progress."""
    exited: bool = False
    """True if a health check found that its worker exited. Its next request fails, which removes it."""
    warned: bool = False
    """True if a failed progress report was logged."""


class Router:
    """Chooses slots by load and routing key. Each choice takes logarithmic time in the number of replicas."""

    def __init__(self, routing: Routing, max_running: int | None) -> None:
        """At most `max_running` outputs run on a replica."""
        self._routing, self._max = routing, max_running
        self.slots: dict[int, ReplicaSlot] = {}
        """Live slots by number, in order of addition."""
        self._heap: list[tuple[int, int]] = []
        """Load and number; entries that differ from their slot's load are stale."""
        self._homes: OrderedDict[str, ReplicaSlot] = OrderedDict()
        """By routing key, the most recently used last."""

    def add(self, slot: ReplicaSlot) -> None:
        """Add a slot to the candidates."""
        self.slots[slot.number] = slot
        heapq.heappush(self._heap, (slot.load, slot.number))

    def remove(self, slot: ReplicaSlot) -> None:
        """Stop routing to a slot."""
        slot.alive = False
        self.slots.pop(slot.number, None)

    def change(self, slot: ReplicaSlot, by: int) -> None:
        """Update a slot's load."""
        slot.load += by
        if slot.alive:
            heapq.heappush(self._heap, (slot.load, slot.number))
            # Stale entries leave only at the front: without a rebuild the heap would grow with every request.
            if len(self._heap) > 64 + 8 * len(self.slots):
                self._heap = [(slot.load, slot.number) for slot in self.slots.values()]
                heapq.heapify(self._heap)

    def has_capacity(self, slot: ReplicaSlot) -> bool:
        """True if more outputs may run there."""
        return self._max is None or slot.load < self._max

    def choose(self, key: str) -> ReplicaSlot | None:
        """The slot for a routing key: one with capacity, or with `sticky` its home, which may be full. None if no slot
        has capacity."""
        if self._routing != "least_loaded":
            home = self._homes.get(key)
            if home is not None and home.alive:
                self._homes.move_to_end(key)
                if self._routing == "sticky" or (self.has_capacity(home) and not self._is_far_busier(home)):
                    return home
        slot = self._least_loaded()
        if slot is None or not self.has_capacity(slot):
            return None
        if self._routing != "least_loaded":
            self._homes[key] = slot
            self._homes.move_to_end(key)
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        return slot

    def _is_far_busier(self, slot: ReplicaSlot) -> bool:
        least = self._least_loaded()
        return least is not None and slot.load > max(least.load + BUSIER_BY, BUSIER_TIMES * least.load)

    def _least_loaded(self) -> ReplicaSlot | None:
        while self._heap:
            load, number = self._heap[0]
            slot = self.slots.get(number)
            if slot is not None and slot.load == load:
                return slot
            heapq.heappop(self._heap)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthTimeouts:
    """Maximum seconds without a heartbeat.

    Requests have no deadline, because they may wait long in the engine's queue.
    """

    token_s: float = math.inf
    """Maximum seconds without a new token or a result, and of an idle replica without a reply (`replica_timeout`)."""
    result_s: float = math.inf
    """Maximum seconds without a result, for engines that do not report progress (`rpc_timeout`)."""


NO_TIMEOUTS = HealthTimeouts()


class HealthMonitor:
    """Polls the progress of each replica in a separate task, so that a hanging replica does not delay others.

    New tokens and results are heartbeats of a busy replica. Any reply is a heartbeat of an idle one.
    """

    def __init__(
        self, timeouts: HealthTimeouts, poll_s: float, terminate: Callable[[ReplicaSlot, str], Awaitable[None]]
    ) -> None:
        """Poll every `poll_s` seconds; 0 disables polling. `terminate` is called with the slot and the reason."""
        self.timeouts, self._poll_s, self._terminate = timeouts, poll_s, terminate
        self._limit_s = max(poll_s, timeouts.token_s / POLLS)
        self._tasks: dict[ReplicaSlot, asyncio.Task[None]] = {}
        self._streams: dict[ReplicaSlot, asyncio.Task[None]] = {}
        self._suspended = 0

    def start(self, slot: ReplicaSlot) -> None:
        """Start health checks of a slot whose engine has started. Idempotent."""
        if self._poll_s and slot not in self._tasks:
            self.heartbeat(slot)
            self._tasks[slot] = background(self._watch(slot), name=f"{slot.replica.name}: progress")
        if _has_streams(slot) and slot not in self._streams:
            self._streams[slot] = background(self._stream(slot), name=f"{slot.replica.name}: streams")

    def heartbeat(self, slot: ReplicaSlot) -> None:
        """Reset a slot's time without a heartbeat."""
        slot.heartbeat_at, slot.silent_s = asyncio.get_running_loop().time(), 0.0

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the timeouts in the block, in which replicas are not expected to sample."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1
            for slot in self._tasks:
                self.heartbeat(slot)

    async def close(self) -> None:
        """Stop polling."""
        await cancel_all([*self._tasks.values(), *self._streams.values()])

    async def _watch(self, slot: ReplicaSlot) -> None:
        TRACE.set(None)  # a span per poll would hide those of the requests
        try:
            pause_s, checked_at = self._poll_s, slot.heartbeat_at
            while slot.alive and not slot.exited:
                await asyncio.sleep(pause_s)
                took_s = await self._poll(slot)
                now, longest_s = asyncio.get_running_loop().time(), pause_s + self._limit_s
                # A longer interval means that this event loop was blocked and received no heartbeats.
                slot.silent_s += min(now - max(slot.heartbeat_at, checked_at), longest_s)
                checked_at = now
                pause_s = min(max(self._poll_s, PAUSES * took_s), self._limit_s)
                if why := self._timeout(slot):
                    await self._terminate(slot, why)
                    return
        finally:
            del self._tasks[slot]

    async def _stream(self, slot: ReplicaSlot) -> None:
        """Poll a replica while it has streamed requests."""
        TRACE.set(None)
        try:
            pause_s = STREAM_S
            while slot.alive and slot.reports and _has_streams(slot):
                await asyncio.sleep(pause_s)
                pause_s = max(STREAM_S, STREAM_PAUSES * await self._poll(slot))
        finally:
            del self._streams[slot]

    async def _poll(self, slot: ReplicaSlot) -> float:
        """Poll and store the slot's progress. Returns the duration in seconds."""
        time = asyncio.get_running_loop().time
        begun, limit_s = time(), None if self._limit_s == math.inf else self._limit_s
        try:
            async with asyncio.timeout(limit_s):  # Python 3.11's `wait_for` may swallow a cancellation by `close`
                reported = await slot.replica.progress()
        except InvalidCompletionError:
            raise
        except (TimeoutError, WorkerDiedError) as error:  # a lost replica's requests fail with its error
            log.debug("%s: progress report failed: %r", slot.replica.name, error)
            slot.exited = isinstance(error, WorkerDiedError)
            return 0.0
        except RollError as error:
            self._replied(slot)
            if not slot.warned:
                slot.warned = True
                log.warning("%s: progress report failed: %s", slot.replica.name, error)
            return 0.0
        self._replied(slot)
        slot.reports = reported is not None
        for completion in reported or ():
            # The request may have ended during the poll.
            sub = slot.running.get(completion.id)
            if sub is not None and sub.report(completion.outputs):
                self.heartbeat(slot)
        return time() - begun

    def _replied(self, slot: ReplicaSlot) -> None:
        if not slot.running:  # otherwise its engine may hang although its worker replies
            self.heartbeat(slot)

    def _timeout(self, slot: ReplicaSlot) -> str:
        """Reason for terminating the replica; empty if it is healthy."""
        if self._suspended or not slot.alive or slot.exited:
            return ""
        by_reply = slot.reports or not slot.running
        limit_s = self.timeouts.token_s if by_reply else self.timeouts.result_s
        silent_s = slot.silent_s
        if silent_s < limit_s:
            return ""
        if not slot.running:
            return f"no reply to health checks for {silent_s:.0f} s, replica_timeout allows {limit_s:g} s"
        first, *others = slot.running
        work = f"the request {first}" + (f" and {len(others)} more" if others else "")
        if slot.reports:
            return f"{work} waited {silent_s:.0f} s for a token, replica_timeout allows {limit_s:g} s"
        return (
            f"{work} waited {silent_s:.0f} s for a result, rpc_timeout allows {limit_s:g} s (its engine does not report"
            " progress)"
        )


def _has_streams(slot: ReplicaSlot) -> bool:
    return any(sub.parent.on_progress is not None for sub in slot.running.values())
