"""Infer strategy `vllm`: one replica of vLLM's engine in its own processes, driven from the worker's event loop.

worker (this module)                         engine's processes (vLLM's, with `worker.WorkerExtension`)
--------------------                         ----------------------------------------------------------
generate()         -- AsyncLLM.generate -->  one request per output
HTTP (`serving`)   -- AsyncLLM.generate -->  the same engine, through vLLM's own server
update_weights()   -- pause, keep -------->  generation pauses; running requests will recompute their KV cache
                   -- buckets ------------>  `transfer.BucketTransfer` loads them, layer by layer
                   <- digests -------------  `held.Reader` reads the loaded weights back
                   -- resume ------------->  generation continues with the new weights
sleep()            -- pause -------------->  releases the KV cache; on an accelerator weights too
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.errors import DataError, EngineDiedError, RollError, UnsupportedError
from roll_core.spec.infer import InferStrategy, check_request
from roll_core.types import Completion
from roll_core.weights.device_memory import slot_devices
from roll_infer_vllm.adapter_weights import AdapterWeights
from roll_infer_vllm.config import VllmConfig
from roll_infer_vllm.deaths import engine_deaths, while_it_lives
from roll_infer_vllm.drawing import Drawing
from roll_infer_vllm.engine_metrics import KINDS, EngineMetrics
from roll_infer_vllm.launch import launch
from roll_infer_vllm.model_weights import ModelWeights
from roll_infer_vllm.plugin import CAPABILITIES
from roll_infer_vllm.sampling import check_served, sampling_params
from roll_infer_vllm.serving import Server
from roll_infer_vllm.updates import Loader, WeightUpdates

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor
    from vllm.v1.engine.async_llm import AsyncLLM

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.types import GenerateRequest, WeightManifest, WeightReceipt

ABORT_AGAIN_S = 0.05
"""Seconds between repeated aborts: vLLM ignores the abort of a request that it is still receiving."""
SHUTDOWN_S = 30.0
"""Seconds for vLLM's processes to exit and release resources that would otherwise be reported as leaked."""


class VllmStrategy(InferStrategy):
    """Infer strategy `vllm`, see the module docstring. All methods are called on one event loop."""

    capabilities = CAPABILITIES
    metric_kinds = KINDS

    def __init__(self, config: StrategyConfig) -> None:
        super().__init__(config)
        if not isinstance(config, VllmConfig):
            raise TypeError(f"vllm takes a VllmConfig, not a {type(config).__name__}")
        self._settings: VllmConfig = config
        self._engine: AsyncLLM | None = None
        self._updates: WeightUpdates | None = None
        self._adapter: AdapterWeights | None = None
        self._server: Server | None = None
        self._running: dict[str, asyncio.Task[Completion]] = {}
        self._drawings: dict[str, list[Drawing]] = {}
        """Outputs of each running request, by request id."""
        self._metrics = EngineMetrics()
        self._asleep, self._stale = False, config.quantization is not None
        """`_stale`: True from sleep, or from a start without weights, until the next weight update."""

    # -- life ----------------------------------------------------------------------------------------------------------

    @override
    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        if self._engine is not None:
            raise RuntimeError("the engine was started twice")
        self._mesh = mesh
        # The adapter gets the role's name, so HTTP clients do not get the base model by mistake.
        name = mesh.role if model.lora is None else f"{mesh.role}-base"
        self._server = Server(name, self._settings.endpoint_host)
        self._server.listen()
        # Import before `launch`: vLLM stores import errors, whose tracebacks keep all frames alive. The engine must not
        # be in one of these frames.
        await asyncio.to_thread(importlib.import_module, "vllm.v1.engine.async_llm")
        launched = await asyncio.to_thread(launch, self._settings, model, mesh, self._metrics)
        engine = self._engine = launched.engine
        self._files = launched.files
        self._max_model_len = int(engine.model_config.max_model_len)
        loader: Loader
        try:
            if model.lora is not None:
                loader = self._adapter = AdapterWeights(engine, self._who, mesh.role, model.lora)
            else:
                loader = ModelWeights(engine, self._who, self._settings.bucket_mib << 20, slot_devices(mesh))
            self._updates = WeightUpdates(engine, mesh, loader)
            await while_it_lives(engine, engine.collective_rpc("roll_prepare"))
        finally:
            launched.release_files()
        await engine.update_weight_version("0")
        await engine.get_supported_tasks()  # fetched once here, so that requests enter in the order of arrival
        if self._stale:
            await engine.pause_generation(mode="keep", clear_cache=False)  # HTTP requests wait for the first update
        await self._server.start(engine, launched.arguments)

    @override
    async def stop(self) -> None:
        engine, self._engine = self._engine, None
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        if self._server is not None:
            await self._server.stop()
        if engine is None:
            return
        await asyncio.to_thread(engine.shutdown, SHUTDOWN_S)
        if self._updates is not None:
            self._updates.close()
        # Drop all references: an engine that lives until interpreter exit shuts down again when it is collected, after
        # its modules are gone.
        self._server = self._updates = self._adapter = None

    @override
    async def sleep(self) -> None:
        engine = self._ready
        if self._asleep or not self._settings.sleep_level:
            return
        await while_it_lives(engine, self._give_back(engine))
        self._asleep = self._stale = True

    @override
    async def wake(self) -> None:
        engine = self._ready
        if not self._asleep:
            return
        if not self._on_host:
            await while_it_lives(engine, self._take_again(engine))
        # The engine stays paused until the next weight update, because its weights are stale.
        self._asleep = False

    async def _give_back(self, engine: AsyncLLM) -> None:
        if self._on_host:
            await engine.pause_generation(mode="abort", clear_cache=True)
            await engine.collective_rpc("roll_release_cache")
        else:
            await engine.sleep(level=self._settings.sleep_level, mode="abort")

    async def _take_again(self, engine: AsyncLLM) -> None:
        await engine.wake_up()
        await engine.pause_generation(mode="keep", clear_cache=False)

    @override
    def endpoint(self) -> str | None:
        return self._server.url or None if self._server is not None else None

    @property
    def _on_host(self) -> bool:
        return self._mesh.device.partition(":")[0] == "cpu"

    @property
    def _who(self) -> str:
        return f"{self._mesh.role} rank {self._mesh.rank}"

    @property
    def _ready(self) -> AsyncLLM:
        if self._engine is None:
            raise RuntimeError("the engine does not run: start it first, and not after stop")
        return self._engine

    @override
    async def update_weights(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool = False
    ) -> WeightReceipt:
        engine = self._ready
        if self._updates is None or self._asleep:
            raise RuntimeError("the engine sleeps: wake it before its weights are updated")
        receipt = await while_it_lives(engine, self._updates.apply(version, manifest, tensors, self._weights_changed))
        if self._server is not None and self._adapter is not None:
            self._server.serve_adapter(self._adapter.request)
        self._stale = False
        return receipt

    # -- requests ------------------------------------------------------------------------------------------------------

    @override
    async def generate(self, request: GenerateRequest) -> Completion:
        _ = self._ready
        if self._stale:
            raise RuntimeError(
                "the engine has slept, or has no weights yet: weights have to be published to it before it generates"
            )
        limit = f"the engine's max_model_len {self._max_model_len}"
        check_request(request, vocab_size=self._files.vocab_size, max_tokens=self._max_model_len, limit=limit)
        check_served(request)
        if request.params.stop and not request.params.ignore_eos:
            if not all(request.params.stop):
                raise DataError("stop strings: an empty string would end every response at once")
            if not self._files.tokenizer:
                raise UnsupportedError(
                    "stop strings need a tokenizer, and this role's model has none; stop_token_ids work without"
                )
        if request.id in self._running:
            raise DataError(f"request {request.id!r}: a request of this id is still running; ids are unique")
        task = asyncio.create_task(self._complete(request), name=f"vllm-{request.id}")
        self._running[request.id] = task
        try:
            return await task
        finally:
            del self._running[request.id]

    @override
    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        engine = self._ready
        chosen = {each: self._running[each] for each in ids if each in self._running}
        waiting = set(chosen.values())
        while waiting:
            drawings = [one for each, task in chosen.items() if task in waiting for one in self._drawings.get(each, ())]
            with engine_deaths():
                await engine.abort([one.name for one in drawings])
            _, waiting = await asyncio.wait(waiting, timeout=ABORT_AGAIN_S)
        return [task.result() for task in chosen.values() if not task.cancelled() and task.exception() is None]

    @override
    async def progress(self) -> list[Completion]:
        found = self._drawings.items()
        return [Completion(id=id, outputs=tuple(each.output() for each in drawings)) for id, drawings in found]

    @override
    def metrics(self) -> Mapping[str, float]:
        return self._metrics.take()

    async def _complete(self, request: GenerateRequest) -> Completion:
        drawings = [Drawing(request, index, self._version) for index in range(request.n)]
        self._drawings[request.id] = drawings
        drawing = [asyncio.create_task(self._draw(each)) for each in drawings]
        try:
            await asyncio.gather(*drawing)
        finally:
            for task in drawing:
                task.cancel()
            await asyncio.gather(*drawing, return_exceptions=True)
            del self._drawings[request.id]
            await self._forget([each.name for each in drawings if not each.is_over])
        outputs = tuple(each.output() for each in drawings)
        return Completion(id=request.id, outputs=outputs, prompt_logprobs=drawings[0].prompt_logprobs)

    async def _forget(self, names: Sequence[str]) -> None:
        """Abort requests in vLLM: it keeps a request whose call is cancelled while vLLM is still receiving it."""
        if names and self._engine is not None:
            with contextlib.suppress(EngineDiedError), engine_deaths():
                await self._engine.abort(names)

    async def _draw(self, drawing: Drawing) -> None:
        """Generate one output until vLLM finishes it. Raises `DataError`, `EngineDiedError`, `RollError`."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input

        request = drawing.request
        try:
            with engine_deaths():
                async for each in self._ready.generate(
                    tokens_input(request.prompt_ids.tolist()),
                    sampling_params(request, drawing.index, self._files.end_ids),
                    drawing.name,
                    lora_request=self._adapter.request if self._adapter is not None else None,
                    priority=request.priority,
                ):
                    drawing.take(each)
        except (VLLMClientError, ValueError) as error:
            raise DataError(f"request {request.id!r}: {error}") from error
        if not drawing.is_over:
            raise RollError(f"{self._who}: vLLM ended request {drawing.name!r} without an answer")

    @property
    def _version(self) -> int:
        return self._updates.version if self._updates is not None else 0

    def _weights_changed(self, version: int) -> None:
        for drawings in self._drawings.values():
            for each in drawings:
                each.weights_changed(version)
