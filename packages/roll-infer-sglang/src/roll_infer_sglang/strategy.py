"""`sglang`: one replica of SGLang, as a server of the worker's own, driven from the worker's event loop.

worker (this module)                       SGLang's processes (with `sampler` and `loader` of this package)
--------------------                       ----------------------------------------------------------------
generate()        -- /generate --------->  one request per output; all of a turn of the event loop enter together
update_weights()  -- /abort_request ---->  what runs ends where it is, and waits here
                  -- compare, load ----->  `loader` takes buckets in, by the model's own loader
                  <- digests ------------  `held` reads back what is there
                  -- /flush_cache ------>  then interrupted requests enter again, with what they have drawn

SGLang cannot go on with a request and yet drop what its cache has of it: it drops the cache only when nothing runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import (
    DataError,
    ModelError,
    RollError,
    StaleWeightsError,
    UnsupportedError,
)
from roll_core.spec.infer import InferStrategy
from roll_core.spec.requests import check_request
from roll_core.types import Completion, WeightReceipt
from roll_infer_sglang.config import SglangConfig
from roll_infer_sglang.drawing import Draw
from roll_infer_sglang.engine_environment import engine_environment
from roll_infer_sglang.engine_metrics import KINDS, EngineMetrics
from roll_infer_sglang.model_files import ModelFiles, model_files
from roll_infer_sglang.plugin import CAPABILITIES
from roll_infer_sglang.registration import SAMPLING_BACKEND
from roll_infer_sglang.sampling import check_served, sampling_params
from roll_infer_sglang.server import Server, ServerError
from roll_infer_sglang.texts import Texts
from roll_infer_sglang.transfer import LOADER, Transfer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.types import CompletionOutput, GenerateRequest, WeightManifest

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
CPU_CACHE_TOKENS = 1 << 16
"""Of keys and values on a CPU, where nothing else is said: SGLang would take most of the host's memory."""
SPARE_TOKENS = 8
"""SGLang keeps so many of its context length back, or fewer."""
ABORT_AGAIN_S = 0.05
"""SGLang ignores the abort of a request that it has not yet."""
DRAIN_S = 0.9
"""For aborted requests to end, before SGLang is asked to wait for them itself, which it does second by second."""


class SglangStrategy(InferStrategy):
    """See the module. All methods are called on one event loop."""

    capabilities = CAPABILITIES
    metric_kinds = KINDS

    def __init__(self, config: StrategyConfig) -> None:
        super().__init__(config)
        if not isinstance(config, SglangConfig):
            raise TypeError(f"sglang takes a SglangConfig, not a {type(config).__name__}")
        self._settings: SglangConfig = config
        self._server: Server | None = None
        self._version = 0
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._entering: list[Draw] = []
        """Draws of this turn of the event loop."""
        self._names = itertools.count()
        self._updating = asyncio.Lock()
        self._open = asyncio.Event()
        """Clear while weights are replaced: nothing enters."""
        self._open.set()
        self._texts: Texts | None = None
        """From the first request with stop strings on."""
        self._metrics = EngineMetrics()

    # -- life ----------------------------------------------------------------------------------------------------------

    @override
    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        if self._server is not None:
            raise RuntimeError("the engine was started twice")
        self._mesh, self._model = mesh, model
        self._num_slots = self._settings.tp_size or mesh.num_slots
        device, _, index = mesh.device.partition(":")
        variables = engine_environment(device, os.environ, num_threads=mesh.num_threads, num_slots=self._num_slots)
        given = self._settings.engine_arguments() | {"tp_size": self._num_slots}
        if device == "cpu":
            given.setdefault("max_total_tokens", CPU_CACHE_TOKENS)
        server = Server(self._who)
        with contextlib.ExitStack() as stack:
            files = await asyncio.to_thread(stack.enter_context, model_files(model))
            arguments = given | self._own_arguments(files, device, int(index or 0))
            try:
                await server.start(arguments, variables)
                found = await server.ask("/server_info")
            except ServerError as error:
                await server.stop()
                raise ModelError(
                    f"{self._who}: SGLang does not start with this model and strategy_config: {error}"
                ) from error
            except BaseException:
                await server.stop()
                raise
        self._files = files
        self._limit = min(arguments["context_length"] - SPARE_TOKENS, int(found["max_req_input_len"]))
        self._transfer = Transfer(self._who, server, self._num_slots, self._settings.bucket_mib << 20)
        self._server = server
        self._keep(self._metrics.watch(server, lambda: bool(self._running)))

    @override
    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop()
        self._transfer.close()

    def _own_arguments(self, files: ModelFiles, device: str, index: int) -> dict[str, Any]:
        """The engine's arguments that are not the user's."""
        limit = self._settings.context_length or files.max_positions
        if limit > files.max_positions:
            raise ModelError(
                f"{self._who}: strategy_config.context_length is {limit}, but the model has {files.max_positions}"
                " positions; leave it out, or set max_position_embeddings in model_config_kwargs"
            )
        priorities = ("schedule_low_priority_values_first", "disable_priority_preemption")
        return {
            **files.arguments,
            "context_length": limit + SPARE_TOKENS,
            "dtype": DTYPES[self._model.dtype],
            "random_seed": self._model.seed % 2**31,
            "trust_remote_code": self._model.trust_remote_code,
            "device": device,
            "base_gpu_id": index,
            "sampling_backend": SAMPLING_BACKEND,
            "sampling_defaults": "openai",  # the role's generating_args decide, not the model's files
            "enable_custom_logit_processor": True,
            "custom_weight_loader": [LOADER],
            "weight_version": "0",
            **dict.fromkeys(priorities if self._settings.enable_priority_scheduling else (), True),
            "log_level": self._settings.log_level or "warning",  # type: ignore[attr-defined]  # of `_EngineKeys`
        }

    @property
    def _who(self) -> str:
        return f"{self._mesh.role} rank {self._mesh.rank}"

    @property
    def _ready(self) -> Server:
        if self._server is None:
            raise RuntimeError("the engine does not run: start it first, and not after stop")
        return self._server

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of the engine's, which ends with it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- requests ------------------------------------------------------------------------------------------------------

    @override
    async def generate(self, request: GenerateRequest) -> Completion:
        _ = self._ready
        limit = f"the engine's context of {self._limit} tokens"
        check_request(request, vocab_size=self._files.vocab_size, max_tokens=self._limit, limit=limit)
        check_served(request)
        if request.params.stop and not request.params.ignore_eos:
            await self._prepare_stops(request)
        if request.id in self._running:
            raise DataError(f"request {request.id!r}: a request of this id is still running; ids are unique")
        running = _Running(request)
        self._running[request.id] = running
        running.task = self._keep(self._complete(running))
        try:
            return await running.task
        finally:
            del self._running[request.id]

    @override
    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        server = self._ready
        async with self._updating:
            chosen = [self._running[each] for each in ids if each in self._running]
            draws = [draw for each in chosen for draw in each.draws]
            for draw in draws:
                draw.aborted = True
            waiting = {each.task for each in chosen if each.task is not None}
            while waiting:
                asking = [server.ask("/abort_request", {"rid": draw.name}) for draw in draws if not draw.answer.done()]
                await asyncio.gather(*asking)
                _, waiting = await asyncio.wait(waiting, timeout=ABORT_AGAIN_S)
        tasks = [each.task for each in chosen if each.task is not None]
        return [task.result() for task in tasks if not task.cancelled() and task.exception() is None]

    @override
    def endpoint(self) -> str | None:
        return f"{self._ready.url}/v1"

    @override
    def metrics(self) -> Mapping[str, float]:
        return self._metrics.take()

    async def _complete(self, running: _Running) -> Completion:
        drawing = [asyncio.create_task(self._draw(draw)) for draw in running.draws]
        try:
            outputs = await asyncio.gather(*drawing)
        finally:
            for task in drawing:
                task.cancel()
            await asyncio.gather(*drawing, return_exceptions=True)
            forgotten = [draw for draw in running.draws if draw.asked and not draw.answer.done()]
            if forgotten and self._server is not None:
                self._keep(_forget(self._server, forgotten))
        first = running.draws[0]
        return Completion(id=first.request.id, outputs=tuple(outputs), prompt_logprobs=first.prompt_logprobs)

    async def _draw(self, draw: Draw) -> CompletionOutput:
        """One output. An update interrupts it; it enters again with what it has."""
        while True:
            if not self._open.is_set():
                await self._open.wait()
            self._enter(draw)
            version = self._version
            answer = await draw.answer
            self._metrics.note(answer["meta_info"])
            draw.take(answer, version)
            if (end := draw.end(self._files.end_ids, self._texts.decode if self._texts else None)) is not None:
                return draw.output(*end)
            reason = answer["meta_info"]["finish_reason"]
            if reason["type"] == "stop":  # by an end token that only the tokenizer knows
                return draw.output(len(draw.tokens), "stop", reason.get("matched"))
            if reason["type"] != "abort" or reason.get("status_code"):
                raise RollError(f"{self._who}: SGLang ended request {draw.request.id!r}: {reason}")
            if draw.aborted:
                return draw.output(len(draw.tokens), "abort", None)

    def _enter(self, draw: Draw) -> None:
        """Ask for the rest of it, together with all that enters in this turn of the event loop."""
        draw.answer = asyncio.get_running_loop().create_future()
        draw.name = f"{next(self._names)}."  # SGLang aborts a name once more, two seconds after its stream has ended
        draw.asked = True
        if not self._entering:
            asyncio.get_running_loop().call_soon(self._send_entering)
        self._entering.append(draw)

    def _send_entering(self) -> None:
        entering, self._entering = self._entering, []
        by_priority: defaultdict[int, list[Draw]] = defaultdict(list)
        for draw in entering:
            by_priority[draw.request.priority].append(draw)
        for draws in by_priority.values():
            self._keep(self._stream(draws))

    async def _stream(self, draws: list[Draw]) -> None:
        """Hand each draw its answer, or what went wrong."""
        answers = [draw.answer for draw in draws]  # one that was interrupted may have entered again before this ends
        error: BaseException = asyncio.CancelledError()
        try:
            server = self._ready
            async for said in server.stream("/generate", self._body(server, draws)):
                if "error" in said:
                    raise DataError(f"{self._who}: SGLang refuses a request: {said['error'].get('message')}")
                if said["meta_info"]["finish_reason"] is not None:
                    answer = answers[said["index"]]
                    if not answer.done():
                        answer.set_result(said)
            error = RollError(f"{self._who}: SGLang ended a request without an answer")
        except Exception as found:  # each of them raises it
            error = found
        finally:
            for answer in answers:
                if answer.done():
                    continue
                if isinstance(error, asyncio.CancelledError):
                    answer.cancel()
                else:
                    answer.set_exception(error)

    def _body(self, server: Server, draws: list[Draw]) -> dict[str, Any]:
        params = [self._params(draw) for draw in draws]
        wants_prompt = [draw.request.prompt_logprobs and draw.index == 0 and not draw.tokens for draw in draws]
        return {
            "input_ids": [draw.prompt for draw in draws],
            "sampling_params": params,
            "rid": [draw.name for draw in draws],
            "return_logprob": True,
            "logprob_start_len": [0 if wants else -1 for wants in wants_prompt],
            "custom_logit_processor": [server.carrier if "custom_params" in each else None for each in params],
            "stream": True,
            "priority": draws[0].request.priority if self._settings.enable_priority_scheduling else None,
        }

    def _params(self, draw: Draw) -> dict[str, Any]:
        found = sampling_params(draw.request, draw.index, len(draw.tokens), self._files.end_ids)
        if self._texts is not None and "stop" in found:
            found["stop"] = [stop for stop in found["stop"] if self._texts.writable(stop)]
        return found

    async def _prepare_stops(self, request: GenerateRequest) -> None:
        """Stop strings are looked for here too, which takes a tokenizer."""
        if not all(request.params.stop):
            raise DataError("stop strings: an empty string would end every response at once")
        if "tokenizer_path" not in self._files.arguments:
            raise UnsupportedError(
                "stop strings need a tokenizer, and this role's model has none; stop_token_ids work without"
            )
        if self._texts is None:
            self._texts = await asyncio.to_thread(Texts, self._model)

    # -- weights -------------------------------------------------------------------------------------------------------

    @override
    async def update_weights(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool = False
    ) -> WeightReceipt:
        async with self._updating:
            server = self._ready
            if version < self._version or version != manifest.version:
                raise StaleWeightsError(
                    f"{self._who}: was sent version {version} with a manifest of version {manifest.version}"
                    f" while it holds version {self._version}"
                )
            self._open.clear()
            try:
                await self._drain(server)
                await self._transfer.compare(manifest)
                try:
                    await self._transfer.load(manifest, iter(tensors))
                    digests = await self._transfer.digests(manifest)
                finally:
                    await server.ask("/flush_cache", {})
                self._version = version
            finally:
                with contextlib.suppress(RollError):  # a dead server has been complained of
                    await server.ask("/continue_generation", {})
                self._open.set()
        return WeightReceipt(version=version, digests=digests, role=self._mesh.role, rank=self._mesh.rank)

    async def _drain(self, server: Server) -> None:
        """Interrupt what runs; returns when nothing does."""
        draws = [draw for each in self._running.values() for draw in each.draws if draw.asked]
        if draws:
            await server.ask("/abort_request", {"abort_all": True})
            await asyncio.wait([draw.answer for draw in draws], timeout=DRAIN_S)
        await server.ask("/pause_generation", {"mode": "abort"})


class _Running:
    """A call of `generate`."""

    def __init__(self, request: GenerateRequest) -> None:
        loop = asyncio.get_running_loop()
        self.draws = [Draw(request=request, index=index, answer=loop.create_future()) for index in range(request.n)]
        self.task: asyncio.Task[Completion] | None = None


async def _forget(server: Server, draws: Sequence[Draw]) -> None:
    """Of calls that were cancelled."""
    for draw in draws:
        with contextlib.suppress(ServerError):
            await server.ask("/abort_request", {"rid": draw.name})
