"""Running requests of an SGLang server: batched submission, interruption and resubmission of partial outputs.

generate()  -> one `Draw` per output -> all outputs of one event loop iteration are submitted in one call of /generate
            <- partial outputs, which `progress` returns, and the end
halt()      -> SGLang aborts all running outputs; nothing is submitted until `go_on`
go_on()     -> interrupted outputs are submitted again, with their tokens so far appended to the prompt
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from roll_core.errors import DataError, RollError, UnsupportedError
from roll_core.types import Completion
from roll_infer_sglang.drawing import Draw
from roll_infer_sglang.sampling import sampling_params
from roll_infer_sglang.server import Server, ServerError
from roll_infer_sglang.texts import Texts

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from roll_core.spec.model import ModelSpec
    from roll_core.types import CompletionOutput, GenerateRequest
    from roll_infer_sglang.drawing import End
    from roll_infer_sglang.engine_metrics import EngineMetrics
    from roll_infer_sglang.routing import Routing
    from roll_modeling.engine_files import EngineFiles

ABORT_AGAIN_S = 0.05
"""Seconds between repeated aborts: SGLang ignores the abort of a request that it has not received yet."""
DRAIN_S = 0.9
"""Seconds for aborted requests to end before `/pause_generation` waits for them, which it polls once per second."""


class Requests:
    """Running requests of one engine. All methods are called on one event loop.

    Calls of `abort`, `halt` and `go_on` must not overlap.
    """

    def __init__(
        self,
        server: Server,
        who: str,
        model: ModelSpec,
        files: EngineFiles,
        metrics: EngineMetrics,
        *,
        priorities: bool,
        routing: Routing | None = None,
    ) -> None:
        """`priorities`: True if the engine schedules by request priority.

        `routing`: expert layout of the model, if the engine returns routed experts.
        """
        self._server, self._who, self._model, self._files = server, who, model, files
        self._metrics, self._priorities = metrics, priorities
        self._routing = routing
        self.version = 0
        """Version of the weights that generate."""
        self.adapter: str | None = None
        """Name of the LoRA adapter that requests use; None if they use the model itself."""
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._streams: set[asyncio.Task[None]] = set()
        """Open calls of /generate."""
        self._entering: list[Draw] = []
        """Outputs to submit at the end of this event loop iteration."""
        self._names = (f"{mark}.{number}." for mark in [secrets.token_hex(8)] for number in itertools.count())
        """Request ids in SGLang; the random prefix keeps other clients of the server from guessing them."""
        self._is_open = True
        """False between `halt` and `go_on`, when nothing may be submitted."""
        self._texts: Texts | None = None
        """Tokenizer for stop strings; loaded with the first request that has some."""
        self._keep(metrics.watch(server, lambda: bool(self._running)))

    async def close(self) -> None:
        """Cancel all running tasks."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def ids(self) -> list[str]:
        """Ids of the running requests."""
        return [*self._running]

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate a completion, see `InferStrategy.generate`. The caller has checked that the engine can serve it."""
        if request.params.stop and not request.params.ignore_eos:
            await self._prepare_stops(request)
        if request.id in self._running:
            raise DataError(f"request {request.id!r}: a request of this id is still running; ids are unique")
        running = _Running(request, may_enter=self._is_open)
        self._running[request.id] = running
        running.task = self._keep(self._complete(running))
        try:
            return await running.task
        finally:
            del self._running[request.id]

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """Abort requests and return their partial outputs, see `InferStrategy.abort`."""
        chosen = [self._running[each] for each in ids if each in self._running]
        draws = [draw for each in chosen for draw in each.draws]
        for draw in draws:
            draw.aborted = True
            draw.turn.set()  # outputs that wait for submission end with their tokens so far
        await asyncio.gather(*[self._end(draw) for draw in draws if draw.asked])
        tasks = [each.task for each in chosen if each.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        return [task.result() for task in tasks if not task.cancelled() and task.exception() is None]

    def progress(self) -> list[Completion]:
        """Partial outputs of all running requests, see `InferStrategy.progress`."""
        return [
            Completion(id=id, outputs=tuple(self._as_far_as_drawn(each) for each in running.draws))
            for id, running in self._running.items()
        ]

    async def halt(self) -> None:
        """Interrupt all running outputs and stop submission. Returns when SGLang has no request of this worker.

        A request that reaches SGLang after the pause would wait there until the pause ends and ignore aborts. Therefore
        its connection is closed, and `go_on` submits it again.
        """
        self._is_open = False
        for draw in self._draws:
            draw.turn.clear()
        if self._streams:
            await self._server.ask("/abort_request", {"abort_all": True})
            await self._drained()
        await self._server.ask("/pause_generation", {"mode": "abort"})
        behind = await self._drained()
        for stream in behind:
            stream.cancel()
        await asyncio.gather(*behind, return_exceptions=True)

    async def _drained(self) -> set[asyncio.Task[None]]:
        """Wait up to `DRAIN_S` for the open calls of /generate. Returns those that are still open."""
        streams = [*self._streams]
        return (await asyncio.wait(streams, timeout=DRAIN_S))[1] if streams else set()

    async def go_on(self) -> None:
        """Resume generation: submit interrupted outputs and requests that arrived since `halt`."""
        with contextlib.suppress(RollError):  # if the server is dead, the requests themselves raise
            await self._server.ask("/continue_generation", {})
        self._is_open = True
        for draw in self._draws:
            draw.turn.set()

    # -- one request ---------------------------------------------------------------------------------------------------

    async def _complete(self, running: _Running) -> Completion:
        drawing = [asyncio.create_task(self._draw(draw)) for draw in running.draws]
        try:
            outputs = await asyncio.gather(*drawing)
        finally:
            for task in drawing:
                task.cancel()
            await asyncio.gather(*drawing, return_exceptions=True)
            for draw in running.draws:
                if draw.asked and not draw.answer.done():  # the call was cancelled, or another output failed
                    self._keep(self._end(draw))
        first = running.draws[0]
        return Completion(id=first.request.id, outputs=tuple(outputs), prompt_logprobs=first.prompt_logprobs)

    async def _draw(self, draw: Draw) -> CompletionOutput:
        """Generate one output. After an interruption by a weight update, submit it again with its tokens so far."""
        while draw.outcome is None:
            await draw.turn.wait()
            if draw.aborted:
                return draw.output(len(draw.tokens), "abort", None)
            self._enter(draw)
            said = await asyncio.shield(draw.answer)  # `_complete` needs its state to abort after a cancellation
            if said is None:
                continue
            meta = said["meta_info"]
            self._metrics.note(meta)
            if self._routing is not None:
                draw.note_experts(self._routing.read(meta))
            draw.outcome = self._outcome(draw, meta["finish_reason"])
        return draw.outcome

    def _outcome(self, draw: Draw, reason: Mapping[str, Any]) -> CompletionOutput | None:
        """Final output after SGLang has ended its request; None if it was interrupted and must continue.

        Raises `RollError` for an abort that SGLang made by itself.
        """
        if (end := self._end_of(draw)) is not None:
            return draw.output(*end)
        if reason["type"] == "stop":  # an end token that only the tokenizer defines
            return draw.output(len(draw.tokens), "stop", reason.get("matched"))
        if reason["type"] != "abort" or reason.get("status_code"):
            raise RollError(f"{self._who}: SGLang ended request {draw.request.id!r}: {reason}")
        return draw.output(len(draw.tokens), "abort", None) if draw.aborted else None

    def _as_far_as_drawn(self, draw: Draw) -> CompletionOutput:
        if draw.outcome is not None:
            return draw.outcome
        return draw.output(*(self._end_of(draw) or (len(draw.tokens), "abort", None)))

    def _end_of(self, draw: Draw) -> End | None:
        return draw.end(self._files.end_ids, self._texts.decode if self._texts else None)

    async def _end(self, draw: Draw) -> None:
        """Abort the output's current SGLang request; repeats the abort until the request has ended."""
        name, answer = draw.name, draw.answer
        while not answer.done():
            with contextlib.suppress(ServerError):  # a dead server has nothing to abort
                await self._server.ask("/abort_request", {"rid": name})
            await asyncio.wait([answer], timeout=ABORT_AGAIN_S)

    async def _prepare_stops(self, request: GenerateRequest) -> None:
        """Load the tokenizer, because stop strings are also matched here. Raises `DataError`, `UnsupportedError`."""
        if not all(request.params.stop):
            raise DataError("stop strings: an empty string would end every response at once")
        if not self._files.tokenizer:
            raise UnsupportedError(
                "stop strings need a tokenizer, and this role's model has none; stop_token_ids work without"
            )
        if self._texts is None:
            self._texts = await asyncio.to_thread(Texts, self._model)

    @property
    def _draws(self) -> list[Draw]:
        return [draw for each in self._running.values() for draw in each.draws]

    # -- many at once --------------------------------------------------------------------------------------------------

    def _enter(self, draw: Draw) -> None:
        """Submit the rest of the output, batched with all others submitted in this event loop iteration."""
        draw.answer = asyncio.get_running_loop().create_future()
        draw.name = next(self._names)  # not reused: SGLang aborts an id again two seconds after its stream has ended
        draw.asked, draw.entered = True, len(draw.tokens)
        if not self._entering:
            asyncio.get_running_loop().call_soon(self._send_entering)
        self._entering.append(draw)

    def _send_entering(self) -> None:
        entering, self._entering = self._entering, []
        alike: defaultdict[tuple[int, bool], list[Draw]] = defaultdict(list)
        for draw in entering:
            alike[draw.request.priority, draw.request.routed_experts].append(draw)
        for draws in alike.values():
            stream = self._keep(self._stream(draws))
            self._streams.add(stream)
            stream.add_done_callback(self._streams.discard)

    async def _stream(self, draws: list[Draw]) -> None:
        """Stream one call of /generate: append tokens to each output and resolve its `answer`, also with errors."""
        answers = [draw.answer for draw in draws]  # an interrupted output may be submitted again before this ends
        error: Exception | None = None
        try:
            async for said in self._server.stream("/generate", self._body(draws)):
                if "error" in said:
                    raise DataError(f"{self._who}: SGLang refuses a request: {said['error'].get('message')}")
                answer = answers[said["index"]]
                if answer.done():
                    continue
                draws[said["index"]].take(said)
                if said["meta_info"]["finish_reason"] is not None:
                    answer.set_result(said)
            error = RollError(f"{self._who}: SGLang ended a request without an answer")
        except Exception as found:  # set on every open answer
            error = found
        finally:
            for answer in answers:
                if answer.done():
                    continue
                if error is None:  # cancelled: the connection was closed
                    answer.set_result(None)
                else:
                    answer.set_exception(error)

    def _body(self, draws: list[Draw]) -> dict[str, Any]:
        params = [self._params(draw) for draw in draws]
        wants_prompt = [draw.request.prompt_logprobs and draw.index == 0 and not draw.tokens for draw in draws]
        carrier = self._server.carrier
        return {
            "input_ids": [draw.prompt for draw in draws],
            "sampling_params": params,
            "rid": [draw.name for draw in draws],
            "return_logprob": True,
            "logprob_start_len": [0 if wants else -1 for wants in wants_prompt],
            "custom_logit_processor": [carrier if "custom_params" in each else None for each in params],
            "stream": True,
            "return_routed_experts": draws[0].request.routed_experts,
            "priority": draws[0].request.priority if self._priorities else None,
            "lora_path": [self.adapter] * len(draws) if self.adapter is not None else None,
        }

    def _params(self, draw: Draw) -> dict[str, Any]:
        found = sampling_params(draw.request, draw.index, len(draw.tokens), self._files.end_ids)
        if self._texts is not None and "stop" in found:
            found["stop"] = [stop for stop in found["stop"] if self._texts.writable(stop)]
        return found

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that `close` cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Running:
    """State of one call of `generate`: its outputs and its task."""

    def __init__(self, request: GenerateRequest, *, may_enter: bool) -> None:
        loop = asyncio.get_running_loop()
        self.draws = [Draw(request=request, index=index, answer=loop.create_future()) for index in range(request.n)]
        for draw in self.draws if may_enter else ():
            draw.turn.set()
        self.task: asyncio.Task[Completion] | None = None
