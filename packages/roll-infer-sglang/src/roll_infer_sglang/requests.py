"""Running requests of an SGLang server: batched submission, interruption and resubmission of partial outputs.

generate()   -> one `SglangOutput` per output -> all outputs of one event loop iteration in one call of /generate
             <- partial outputs, which `progress` returns, and the end
interrupt()  -> SGLang aborts all running outputs; nothing is submitted until `resume`
resume()     -> interrupted outputs are submitted again, with their tokens so far appended to the prompt
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import secrets
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from roll_core.errors import DataError, RollError
from roll_core.spec.rollout import MEDIA_KINDS
from roll_core.types import Completion
from roll_infer_sglang.output import SglangOutput
from roll_infer_sglang.release import distinguishes_images
from roll_infer_sglang.sampling import routed_experts, sampling_params
from roll_infer_sglang.server import ServerError, SglangServer
from roll_modeling.model import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from roll_core.spec.model import ModelSpec
    from roll_core.types import CompletionOutput, GenerateRequest
    from roll_infer_sglang.engine_metrics import SglangMetrics
    from roll_infer_sglang.output import End
    from roll_modeling.engine_files import EngineFiles
    from roll_modeling.routing import RoutingLayout

ABORT_INTERVAL_S = 0.05
"""Seconds between repeated aborts: SGLang ignores the abort of a request that it has not received yet."""
DRAIN_S = 0.9
"""Seconds for aborted requests to end before `/pause_generation` waits for them, which it polls once per second."""


class Requests:
    """Running requests of one engine. All methods are called on one event loop.

    Calls of `abort`, `interrupt` and `resume` must not overlap.
    """

    def __init__(
        self,
        server: SglangServer,
        who: str,
        model: ModelSpec,
        files: EngineFiles,
        metrics: SglangMetrics,
        *,
        priorities: bool,
        layout: RoutingLayout | None = None,
    ) -> None:
        """`priorities`: True if the engine schedules by request priority.

        `layout`: expert layout of the model, if the engine returns routed experts.
        """
        self._server, self._who, self._model, self._files = server, who, model, files
        self._metrics, self._priorities = metrics, priorities
        self._layout = layout
        self.adapter: str | None = None
        """Name of the LoRA adapter that requests use; None if they use the model itself."""
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._streams: set[asyncio.Task[None]] = set()
        """Open calls of /generate."""
        self._queue: list[SglangOutput] = []
        """Outputs to submit at the end of this event loop iteration."""
        self._names = (f"{mark}.{number}." for mark in [secrets.token_hex(8)] for number in itertools.count())
        """Request ids in SGLang; the random prefix keeps other clients of the server from guessing them."""
        self._open = True
        """False between `interrupt` and `resume`, when nothing may be submitted."""
        self._stop_strings: _StopStrings | None = None
        """Tokenizer for stop strings; loaded with the first request that has some."""
        self._keep(metrics.watch(server, lambda: bool(self._running)))

    async def close(self) -> None:
        """Cancel all running tasks."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate a completion, see `InferStrategy.generate`. The caller has checked that the engine can serve it."""
        # SGLang can miss stop strings, so they are also matched here.
        if request.params.stop and not request.params.ignore_eos and self._stop_strings is None:
            self._stop_strings = await asyncio.to_thread(_StopStrings, self._model)
        if request.id in self._running:
            raise DataError(f"request {request.id!r}: a request with this id is running; ids must be unique")
        future = asyncio.get_running_loop().create_future
        running = _Running([SglangOutput(request, index, future()) for index in range(request.n)])
        for output in running.outputs if self._open else ():
            output.may_submit.set()
        self._running[request.id] = running
        running.task = self._keep(self._complete(running.outputs))
        try:
            return await running.task
        finally:
            del self._running[request.id]

    async def abort(self, ids: Sequence[str] | None = None) -> list[Completion]:
        """Abort requests (all without `ids`) and return their partial outputs, see `InferStrategy.abort`."""
        chosen = [
            self._running[request_id]
            for request_id in (self._running if ids is None else ids)
            if request_id in self._running
        ]
        outputs = [output for running in chosen for output in running.outputs]
        for output in outputs:
            output.aborted = True
            output.may_submit.set()  # outputs that wait for submission end with their tokens so far
        await asyncio.gather(*[self._abort(output) for output in outputs if output.name])
        tasks = [running.task for running in chosen if running.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        return [task.result() for task in tasks if not task.cancelled() and task.exception() is None]

    def progress(self) -> list[Completion]:
        """Partial outputs of all running requests, see `InferStrategy.progress`."""
        return [
            Completion(
                id=id,
                outputs=tuple(output.final or output.completion(self._end_of(output)) for output in running.outputs),
            )
            for id, running in self._running.items()
        ]

    async def interrupt(self) -> None:
        """Interrupt all running outputs and stop submission. Returns when SGLang has no request of this worker.

        A request that reaches SGLang after the pause would wait there until the pause ends and ignore aborts. Therefore
        its connection is closed, and `resume` submits it again.
        """
        self._open = False
        for output in self._outputs:
            output.may_submit.clear()
        if self._streams:
            await self._server.request("/abort_request", {"abort_all": True})
            await self._drained()
        await self._server.request("/pause_generation", {"mode": "abort"})
        left = await self._drained()
        for stream in left:
            stream.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _drained(self) -> set[asyncio.Task[None]]:
        """Wait up to `DRAIN_S` for the open calls of /generate. Returns those that are still open."""
        streams = [*self._streams]
        return (await asyncio.wait(streams, timeout=DRAIN_S))[1] if streams else set()

    async def resume(self) -> None:
        """Resume generation: submit interrupted outputs and requests that arrived since `interrupt`."""
        with contextlib.suppress(RollError):  # if the server is dead, the requests themselves raise
            await self._server.request("/continue_generation", {})
        self._open = True
        for output in self._outputs:
            output.may_submit.set()

    # -- one request ---------------------------------------------------------------------------------------------------

    async def _complete(self, outputs: Sequence[SglangOutput]) -> Completion:
        tasks = [asyncio.create_task(self._generate(output)) for output in outputs]
        try:
            completed = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for output in outputs:
                if output.name and not output.response.done():  # the call was cancelled, or another output failed
                    self._keep(self._abort(output))
        first = outputs[0]
        return Completion(
            id=first.request.id,
            outputs=tuple(completed),
            prompt_logprobs=first.prompt_logprobs,
            prompt_topk=first.prompt_topk,
        )

    async def _generate(self, output: SglangOutput) -> CompletionOutput:
        """Generate one output. After an interruption by a weight update, submit it again with its tokens so far."""
        while output.final is None:
            await output.may_submit.wait()
            if output.aborted:
                return output.completion()
            self._submit(output)
            response = await asyncio.shield(output.response)  # `_complete` needs it to abort after a cancellation
            if response is None:
                continue
            meta = response["meta_info"]
            self._metrics.add_response(meta)
            self._check_prompt(output, meta)
            if self._layout is not None:
                output.add_experts(routed_experts(meta, self._layout))
            output.final = self._final(output, meta["finish_reason"])
        return output.final

    def _check_prompt(self, output: SglangOutput, meta: Mapping[str, Any]) -> None:
        """Raise `RollError` if SGLang has computed another number of prompt tokens, as if it had expanded images."""
        num = len(output.request.prompt_ids) + output.num_submitted
        if output.request.media and meta["finish_reason"]["type"] != "abort" and meta["prompt_tokens"] != num:
            raise RollError(
                f"{self._who}: request {output.request.id!r} has {num} prompt tokens, and SGLang computed"
                f" {meta['prompt_tokens']}: this model is not supported with images"
            )

    def _final(self, output: SglangOutput, reason: Mapping[str, Any]) -> CompletionOutput | None:
        """Final output after SGLang has ended its request; None if it was interrupted and must continue.

        Raises `RollError` for an abort that SGLang made by itself.
        """
        if (end := self._end_of(output)) is not None:
            return output.completion(end)
        if reason["type"] == "stop":  # an end token that only the tokenizer defines
            return output.completion((len(output.tokens), "stop", reason.get("matched")))
        if reason["type"] != "abort" or reason.get("status_code"):
            raise RollError(f"{self._who}: SGLang ended request {output.request.id!r}: {reason}")
        return output.completion() if output.aborted else None

    def _end_of(self, output: SglangOutput) -> End | None:
        return output.end(self._files.end_ids, self._stop_strings.decode if self._stop_strings else None)

    async def _abort(self, output: SglangOutput) -> None:
        """Abort the output's current SGLang request; repeats the abort until the request has ended."""
        name, response = output.name, output.response
        while not response.done():
            with contextlib.suppress(ServerError):  # a dead server has nothing to abort
                await self._server.request("/abort_request", {"rid": name})
            await asyncio.wait([response], timeout=ABORT_INTERVAL_S)

    @property
    def _outputs(self) -> list[SglangOutput]:
        return [output for running in self._running.values() for output in running.outputs]

    # -- batches -------------------------------------------------------------------------------------------------------

    def _submit(self, output: SglangOutput) -> None:
        """Submit the rest of the output, batched with all others submitted in this event loop iteration."""
        output.response = asyncio.get_running_loop().create_future()
        output.name = next(self._names)  # not reused: SGLang aborts an id again two seconds after its stream has ended
        output.num_submitted = len(output.tokens)
        if not self._queue:
            asyncio.get_running_loop().call_soon(self._send_queue)
        self._queue.append(output)

    def _send_queue(self) -> None:
        queue, self._queue = self._queue, []
        alike: defaultdict[tuple[int, bool, bool], list[SglangOutput]] = defaultdict(list)
        for output in queue:
            request = output.request
            alike[request.priority, request.routed_experts, request.prompt_logprobs].append(output)
        for outputs in alike.values():
            stream = self._keep(self._stream(outputs))
            self._streams.add(stream)
            stream.add_done_callback(self._streams.discard)

    async def _stream(self, outputs: list[SglangOutput]) -> None:
        """Stream one call of /generate: append tokens to each output and resolve its `response`, also with errors."""
        responses = [
            output.response for output in outputs
        ]  # an interrupted output may be submitted again before this ends
        error: Exception | None = None
        try:
            async for message in self._server.stream("/generate", self._body(outputs)):
                if "error" in message:
                    raise DataError(f"{self._who}: SGLang rejected a request: {message['error'].get('message')}")
                response = responses[message["index"]]
                if response.done():
                    continue
                outputs[message["index"]].append(message)
                if message["meta_info"]["finish_reason"] is not None:
                    response.set_result(message)
            error = RollError(f"{self._who}: SGLang ended a request without a finish reason")
        except Exception as raised:  # set on every open response
            error = raised
        finally:
            for response in responses:
                if response.done():
                    continue
                if error is None:  # cancelled: the connection was closed
                    response.set_result(None)
                else:
                    response.set_exception(error)

    def _body(self, outputs: list[SglangOutput]) -> dict[str, Any]:
        params = [self._params(output) for output in outputs]
        wants_prompt = [
            output.request.prompt_logprobs and output.index == 0 and not output.tokens for output in outputs
        ]
        processor = self._server.logit_processor
        return {
            "input_ids": [output.prompt for output in outputs],
            "sampling_params": params,
            "rid": [output.name for output in outputs],
            "return_logprob": True,
            "logprob_start_len": [0 if wants else -1 for wants in wants_prompt],
            "top_logprobs_num": [
                output.request.prompt_topk if wants else 0 for output, wants in zip(outputs, wants_prompt, strict=True)
            ],
            "custom_logit_processor": [processor if "custom_params" in param else None for param in params],
            "stream": True,
            **self._media(outputs),
            "return_routed_experts": outputs[0].request.routed_experts,
            "priority": outputs[0].request.priority if self._priorities else None,
            "lora_path": [self.adapter] * len(outputs) if self.adapter is not None else None,
        }

    def _media(self, outputs: Sequence[SglangOutput]) -> dict[str, Any]:
        """Images and videos of the prompts, as data URLs; empty if no prompt has some."""
        prompts = [output.request.media for output in outputs]
        processor = self._files.processor
        if processor is None or not any(prompts):
            return {}
        every = {item.digest: item for media in prompts for item in media}
        urls = {digest: f"data:;base64,{base64.b64encode(item.read()).decode()}" for digest, item in every.items()}
        body: dict[str, Any] = {
            f"{kind}_data": [[urls[item.digest] for item in media if item.kind == kind] for media in prompts]
            for kind in MEDIA_KINDS
        }
        if outputs[0].request.prompt_logprobs:
            body["token_ids_logprob"] = [*processor.feature_token_ids]
        if not distinguishes_images():
            body["extra_key"] = ["".join(item.digest for item in media) for media in prompts]
        return body

    def _params(self, output: SglangOutput) -> dict[str, Any]:
        params = sampling_params(output.request, output.index, len(output.tokens), self._files.end_ids)
        if self._stop_strings is not None and "stop" in params:
            params["stop"] = [stop for stop in params["stop"] if self._stop_strings.encodable(stop)]
        return params

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that `close` cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@dataclass(slots=True, eq=False)
class _Running:
    """State of one call of `generate`."""

    outputs: list[SglangOutput]
    task: asyncio.Task[Completion] | None = None


class _StopStrings:
    """Tokenizer functions for stop strings."""

    def __init__(self, model: ModelSpec) -> None:
        self._tokenizer = load_tokenizer(model)
        self.encodable = cache(self._encodable)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens with special tokens and without cleanup of spaces."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _encodable(self, text: str) -> bool:
        """True if the tokenizer can encode `text`.

        SGLang encodes every stop string and fails if it cannot. Such strings are not passed to SGLang; they are matched
        only in this process.
        """
        try:
            self._tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # tokenizers raises nothing narrower
            return False
        return True
