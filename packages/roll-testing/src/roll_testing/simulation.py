"""Engines that take time without doing anything, and a clock that skips the waiting.

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(...)     # asyncio.sleep(3600) returns at once, and loop.time() is an hour later

A simulated engine batches continuously: all its rows advance together, the more rows the slower each, and prompts that
are computed hold them up. Between two events all rows have the same speed, so an event costs the logarithm of the
number of rows and not a step for every token.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.errors import WorkerDiedError, WorkerHungError
from roll_core.runtime.rollout.replicas import Replica
from roll_core.types import Completion, CompletionOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roll_core.runtime.rollout.replicas import OnResult
    from roll_core.types import FinishReason, GenerateRequest


_MANY = 1 << 20
_TOKENS = np.broadcast_to(np.int64(0), _MANY)
_LOGPROBS = np.broadcast_to(np.float32(-1.0), _MANY)
_FIRST_VERSION = np.broadcast_to(np.int32(0), _MANY)
"""One number each, as long as any output: a part of them is made in no time and takes no memory."""


class _Skipping(selectors.DefaultSelector):
    """Waits for nothing: the time for which it was to wait has passed."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        """What is ready now."""
        if timeout is None:
            raise RuntimeError("nothing will ever happen: every task waits for another")
        self.loop.now += max(0.0, timeout)
        ready: list[Any] = super().select(0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer as soon as nothing else is to be done. For one thread."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Skipping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self.now


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast a simulated engine is."""

    base_s: float = 0.02
    """Of a decoding step, whatever runs: the weights are read."""
    row_s: float = 0.0001
    """Of a decoding step for each row."""
    prompt_token_s: float = 0.00002
    """To compute one token of a prompt; nothing else advances meanwhile."""
    max_rows: int = 256
    """More wait."""

    def tokens_per_s(self, rows: int) -> float:
        """Of each of so many rows."""
        return 1.0 / (self.base_s + self.row_s * rows)

    @property
    def capacity(self) -> float:
        """Tokens per second of a full engine."""
        return self.max_rows * self.tokens_per_s(self.max_rows)


@dataclass(eq=False, slots=True)
class SimulatedRow:
    """One output."""

    request: _Request
    index: int
    length: int
    """Tokens that it has in the end."""
    stretch: int = 0
    """Tokens that it draws without a break."""
    before: int = 0
    """Tokens that it drew before this stretch."""
    start: float = -1.0
    """The engine's progress when the stretch began; negative while it does not draw."""
    output: CompletionOutput | None = None
    plan: Any = None
    """What a subclass keeps with it."""


@dataclass(eq=False, slots=True)
class _Request:
    request: GenerateRequest
    on_result: OnResult
    rows: list[SimulatedRow] = field(default_factory=list)
    left: int = 0


class SimulatedEngine(Replica):
    """Draws the tokens p, p + 1, p + 2, ... after a prompt of p tokens, so that what is missing or doubled shows."""

    def __init__(
        self, name: str, speed: Speed, length_of: Callable[[str, int], int], *, prompt_tokens: int, real: bool = True
    ) -> None:
        """`length_of(id, index)` tokens has an output of a request of that id, whose prompt has `prompt_tokens`.
        Without `real` tokens outputs are views of one number, which costs no memory."""
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
        """Tokens drawn so far by outputs that ended, and how many did."""

    def submit(self, requests: Sequence[GenerateRequest], on_result: OnResult) -> None:
        """See `Replica.submit`."""
        if self.dead:
            for each in requests:
                asyncio.get_running_loop().call_soon(on_result, each.id, self._death())
            return
        for request in requests:
            made = self._requests[request.id] = _Request(request, on_result)
            base, _, suffix = request.id.partition("#")
            before = len(request.prompt_ids) - self._prompt_tokens
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
        """Advance nothing for so long: weights are replaced."""
        self._catch_up()
        self._stalled_until = max(self._stalled_until, self._at) + seconds
        self._advance()

    async def terminate(self, why: str) -> WorkerDiedError:
        """See `Replica.terminate`."""
        self._end_all()
        return WorkerHungError(self.name, 0, "nowhere", "", why)

    def kill(self) -> None:
        """Die: whatever runs is lost."""
        requests = self._end_all()
        for id, request in requests.items():
            request.on_result(id, self._death())

    # -- inside --------------------------------------------------------------------------------------------------------

    def _end_all(self) -> dict[str, _Request]:
        self.dead = True
        if self._timer is not None:
            self._timer.cancel()
        requests, self._requests = self._requests, {}
        return requests

    def _death(self) -> WorkerDiedError:
        return WorkerDiedError(self.name, 0, "nowhere", "result", "it was killed", "")

    def _catch_up(self) -> None:
        """Let the rows have advanced to now."""
        now = asyncio.get_running_loop().time()
        begin = max(self._at, min(self._stalled_until, now))
        if self._running:
            self._progress += (now - begin) * self.speed.tokens_per_s(self._running)
        self._at = now

    def _advance(self) -> None:
        """Let rows enter and leave, and wait for the next one to end."""
        if self._advancing:  # who is told of an end has begun or ended something else: it is seen to below
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

    def _arrived(self, rows: Sequence[SimulatedRow]) -> None:
        """They are asked for."""
        self._waiting += rows

    def _entered(self, row: SimulatedRow) -> int:
        """Say how far a row draws without a break, and return how many tokens are computed before it begins."""
        row.stretch = row.length
        return len(row.request.request.prompt_ids) if row.index == 0 else 0

    def _reached(self, row: SimulatedRow) -> None:
        """A stretch is drawn."""
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
        drawn = 0 if row.start < 0 else min(row.stretch, int(self._progress - row.start + 1e-6))
        num = row.length if reason == "stop" else row.before + drawn
        first = len(row.request.request.prompt_ids)
        versions = np.broadcast_to(np.int32(self.version), num) if self.version else _FIRST_VERSION[:num]
        return CompletionOutput(
            token_ids=np.arange(first, first + num, dtype=np.int64) if self._real else _TOKENS[:num],
            logprobs=_LOGPROBS[:num],
            versions=versions,
            finish_reason="abort" if reason == "abort" else reason,
        )
