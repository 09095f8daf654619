"""Simulated engines that take time without computing, and an event loop whose clock skips waiting.

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(...)     # asyncio.sleep(3600) returns at once, and loop.time() is an hour later

A simulated engine does continuous batching: all rows decode together, more rows make each one slower, and prefill
stalls decoding. Between two events all rows have the same speed. An event therefore costs the logarithm of the number
of rows, not one step per token.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from roll_core.errors import WorkerDiedError, WorkerHungError
from roll_core.runtime.rollout.replicas import Replica
from roll_core.types import Completion, CompletionOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roll_core.runtime.rollout.replicas import OnResult
    from roll_core.types import FinishReason, GenerateRequest, TokenIds


_MANY = 1 << 20
_TOKENS = np.broadcast_to(np.int64(0), _MANY)
_LOGPROBS = np.broadcast_to(np.float32(-1.0), _MANY)
_FIRST_VERSION = np.broadcast_to(np.int32(0), _MANY)
"""Broadcast constants as long as any output: slicing them costs neither time nor memory."""


class _Skipping(selectors.DefaultSelector):
    """Selector that never blocks: it advances the virtual clock by the timeout instead."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        """Return the events that are ready now. Raises `RuntimeError` on a deadlock."""
        if timeout is None:
            raise RuntimeError("nothing will ever happen: every task waits for another")
        self.loop.now += max(0.0, timeout)
        ready: list[Any] = super().select(0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock jumps to the next timer as soon as the loop is idle. Single-threaded only."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Skipping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self.now


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed of a simulated engine."""

    base_s: float = 0.02
    """Seconds of a decoding step for any number of rows: reading the weights."""
    row_s: float = 0.0001
    """Additional seconds of a decoding step for each row."""
    prompt_token_s: float = 0.00002
    """Seconds to prefill one prompt token; decoding stalls meanwhile."""
    max_rows: int = 256
    """Maximum number of rows that run at once; others are queued."""

    def tokens_per_s(self, rows: int) -> float:
        """Return the tokens per second of each row while `rows` rows run."""
        return 1.0 / (self.base_s + self.row_s * rows)

    @property
    def capacity(self) -> float:
        """Tokens per second of a full engine."""
        return self.max_rows * self.tokens_per_s(self.max_rows)


@dataclass(eq=False, slots=True)
class SimulatedRow:
    """One output of a request."""

    request: _Request
    index: int
    length: int
    """Number of tokens of the complete output."""
    stretch: int = 0
    """Tokens generated without a pause in the current stretch."""
    before: int = 0
    """Tokens generated before the current stretch."""
    start: float = -1.0
    """Engine progress when the stretch began; negative while the row does not decode."""
    output: CompletionOutput | None = None
    plan: Any = None
    """Data that a subclass attaches to the row."""


@dataclass(eq=False, slots=True)
class _Request:
    request: GenerateRequest
    on_result: OnResult
    rows: list[SimulatedRow] = field(default_factory=list)
    left: int = 0


class SimulatedEngine(Replica):
    """Engine that generates tokens p, p + 1, p + 2, ...

    after a prompt of p tokens. Missing and repeated tokens are then visible.
    """

    def __init__(
        self, name: str, speed: Speed, length_of: Callable[[str, int], int], *, prompt_tokens: int, real: bool = True
    ) -> None:
        """`length_of(id, index)` is the length of output `index` of a request.

        Every original prompt has `prompt_tokens` tokens. With `real=False`, outputs are views of one number and need no
        memory.
        """
        self.name, self.speed, self.version = name, speed, 0
        self._length_of, self._prompt_tokens, self._real = length_of, prompt_tokens, real
        self._requests: dict[str, _Request] = {}
        self._waiting: deque[SimulatedRow] = deque()
        self._running = 0
        self._ends: list[tuple[float, int, SimulatedRow]] = []
        self._order = 0
        self._progress = self._at = self._stalled_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._advancing = False
        self.dead = False
        self.tokens = self.ended = 0
        """Total tokens of finished outputs, and the number of finished outputs."""

    def submit(self, requests: Sequence[GenerateRequest], on_result: OnResult) -> None:
        """See `Replica.submit`."""
        if self.dead:
            for each in requests:
                asyncio.get_running_loop().call_soon(on_result, each.id, self._death())
            return
        for request in requests:
            made = self._requests[request.id] = _Request(request, on_result)
            base, _, suffix = request.id.partition("#")
            before = self._sampled_before(request)
            for index in range(request.n):
                which = int(suffix.partition(".")[0]) if suffix else index
                length = max(1, min(self._length_of(base, which) - before, request.params.max_new_tokens))
                made.rows.append(SimulatedRow(made, index, length))
            made.left = len(made.rows)
            self._arrived(made.rows)
        self._advance()

    async def abort(self, ids: Sequence[str]) -> None:
        """See `Replica.abort`."""
        self._catch_up()
        for request in [self._requests[id] for id in ids if id in self._requests]:
            for row in request.rows:
                self._end(row, "abort")
        self._advance()

    def cancel(self, ids: Sequence[str]) -> None:
        """See `Replica.cancel`."""
        self._catch_up()
        for id in ids:
            request = self._requests.pop(id, None)
            if request is not None:
                request.on_result = lambda id, outcome: None
                for row in request.rows:
                    self._end(row, "abort")
        self._advance()

    async def progress(self) -> list[Completion]:
        """See `Replica.progress`."""
        self._catch_up()
        return [
            Completion(id=id, outputs=tuple(row.output or self._output(row, "abort") for row in request.rows))
            for id, request in self._requests.items()
        ]

    def stall(self, seconds: float) -> None:
        """Pause decoding for `seconds`, as a weight update does."""
        self._catch_up()
        self._stalled_until = max(self._stalled_until, self._at) + seconds
        self._advance()

    async def terminate(self, why: str) -> WorkerDiedError:
        """See `Replica.terminate`."""
        self._end_all()
        return WorkerHungError(self.name, 0, "nowhere", "", why)

    def kill(self) -> None:
        """Simulate a crash: all running requests fail with `WorkerDiedError`."""
        requests = self._end_all()
        for id, request in requests.items():
            request.on_result(id, self._death())

    # -- internals -----------------------------------------------------------------------------------------------------

    def _end_all(self) -> dict[str, _Request]:
        self.dead = True
        if self._timer is not None:
            self._timer.cancel()
        requests, self._requests = self._requests, {}
        return requests

    def _death(self) -> WorkerDiedError:
        return WorkerDiedError(self.name, 0, "nowhere", "result", "it was killed", "")

    def _catch_up(self) -> None:
        """Advance all running rows to the current time."""
        now = asyncio.get_running_loop().time()
        begin = max(self._at, min(self._stalled_until, now))
        if self._running:
            self._progress += (now - begin) * self.speed.tokens_per_s(self._running)
        self._at = now

    def _advance(self) -> None:
        """Finish due rows, start queued rows, and set a timer for the next row to finish."""
        if self._advancing:  # called from a result callback: the outer call handles the change
            return
        self._advancing = True
        self._catch_up()
        while self._ends and (self._ends[0][2].output is not None or self._ends[0][0] <= self._progress + 1e-6):
            self._reached(heapq.heappop(self._ends)[2])
        while self._waiting and self._running < self.speed.max_rows:
            row = self._waiting.popleft()
            if row.output is not None:
                continue
            if prompt_tokens := self._entered(row):
                prompt_s = prompt_tokens * self.speed.prompt_token_s
                self._stalled_until = max(self._stalled_until, self._at) + prompt_s
            row.start = self._progress
            self._running += 1
            self._order += 1
            heapq.heappush(self._ends, (row.start + row.stretch, self._order, row))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            left_s = (self._ends[0][0] - self._progress) / self.speed.tokens_per_s(max(1, self._running))
            stalled_s = max(0.0, self._stalled_until - self._at)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._at + stalled_s + max(0.0, left_s), self._advance)
        self._advancing = False

    def _sampled_before(self, request: GenerateRequest) -> int:
        """Number of response tokens at the end of a request's prompt: those of the parts before it."""
        return len(request.prompt_ids) - self._prompt_tokens

    def _tokens(self, row: SimulatedRow, num: int, *, whole: bool) -> TokenIds:
        """The first `num` tokens of a row. `whole`: the last one ends the response."""
        first = len(row.request.request.prompt_ids)
        return np.arange(first, first + num, dtype=np.int64) if self._real else _TOKENS[:num]

    def _arrived(self, rows: Sequence[SimulatedRow]) -> None:
        """Queue the rows of a submitted request."""
        self._waiting += rows

    def _entered(self, row: SimulatedRow) -> int:
        """Set how many tokens the row decodes without a pause. Return the number of tokens to prefill first."""
        row.stretch = row.length
        return len(row.request.request.prompt_ids) if row.index == 0 else 0

    def _reached(self, row: SimulatedRow) -> None:
        """Handle the end of a stretch."""
        self._end(row, "stop")

    def _end(self, row: SimulatedRow, reason: FinishReason) -> None:
        if row.output is not None:
            return
        row.output = self._output(row, reason)
        self.tokens += len(row.output.token_ids)
        self.ended += 1
        self._running -= row.start >= 0
        request = row.request
        request.left -= 1
        if not request.left:
            self._requests.pop(request.request.id, None)
            outputs = tuple(each.output for each in request.rows if each.output is not None)
            request.on_result(request.request.id, Completion(id=request.request.id, outputs=outputs))

    def _output(self, row: SimulatedRow, reason: FinishReason) -> CompletionOutput:
        generated = 0 if row.start < 0 else min(row.stretch, int(self._progress - row.start + 1e-6))
        num = row.length if reason == "stop" else row.before + generated
        versions = np.broadcast_to(np.int32(self.version), num) if self.version else _FIRST_VERSION[:num]
        return CompletionOutput(
            token_ids=self._tokens(row, num, whole=reason == "stop"),
            logprobs=_LOGPROBS[:num],
            versions=versions,
            finish_reason="abort" if reason == "abort" else reason,
        )


class SimulatedReplies(SimulatedEngine):
    """Engine for rollout programs with several turns: replies of one repeated token and an end token.

    Prompts may have any length. Every request must allow the same number of new tokens, `max_new_tokens`: the number of
    tokens before a part of a reply follows from what is left of it.
    """

    def __init__(
        self,
        name: str,
        speed: Speed,
        length_of: Callable[[str, int], int],
        *,
        max_new_tokens: int,
        token_id: int,
        end_id: int,
    ) -> None:
        """`length_of(id, index)` is the length of a reply, with its end token."""
        super().__init__(name, speed, length_of, prompt_tokens=0)
        self._max_new_tokens, self._token_id, self._end_id = max_new_tokens, token_id, end_id

    @override
    def _sampled_before(self, request: GenerateRequest) -> int:
        return self._max_new_tokens - request.params.max_new_tokens

    @override
    def _tokens(self, row: SimulatedRow, num: int, *, whole: bool) -> TokenIds:
        ids = np.full(num, self._token_id, dtype=np.int64)
        if whole:
            ids[-1:] = self._end_id
        return ids
