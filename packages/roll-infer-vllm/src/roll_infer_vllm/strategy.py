"""Infer strategy `vllm`: one replica of vLLM's engine in its own processes, driven from the worker's event loop.

worker (this module)                         engine's processes (vLLM's, with `worker.WorkerExtension`)
--------------------                         ----------------------------------------------------------
generate()         -- AsyncLLM.generate -->  one request per output
HTTP (`serving`)   -- AsyncLLM.generate -->  the same engine, through vLLM's own server
update_weights()   -- pause, keep -------->  generation pauses; running requests will recompute their KV cache
                   -- buckets ------------>  `transfer.BucketTransfer` loads them, layer by layer
                   <- digests -------------  `loaded_model.VllmModel` reads the loaded weights back
                   -- resume ------------->  generation continues with the new weights
sleep()            -- pause -------------->  releases the KV cache; on an accelerator weights too
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import DataError, EngineDiedError, RollError, UnsupportedError
from roll_core.spec.infer import InferStrategy, check_request
from roll_core.spec.weights import check_version
from roll_core.types import Completion, WeightReceipt
from roll_infer_vllm.config import VllmConfig
from roll_infer_vllm.engine_metrics import VllmMetrics
from roll_infer_vllm.images import media_input
from roll_infer_vllm.launch import launch
from roll_infer_vllm.output import VllmOutput
from roll_infer_vllm.processes import VllmProcesses
from roll_infer_vllm.sampling import check_served, sampling_params
from roll_infer_vllm.serving import EndpointServer
from roll_infer_vllm.watchdog import engine_errors, while_alive
from roll_modeling.engine_metrics import KINDS
from roll_modeling.engine_weights import AdapterWeights, EngineWeights, ModelWeights
from roll_weight_transports.buckets import Incoming
from roll_weight_transports.device_memory import slot_devices

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor
    from vllm.v1.engine.async_llm import AsyncLLM

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.types import GenerateRequest, WeightManifest

ABORT_INTERVAL_S = 0.05
"""Seconds between repeated aborts: vLLM ignores the abort of a request that it is still receiving."""
SHUTDOWN_S = 30.0
"""Seconds for vLLM's processes to exit and release resources that would otherwise be reported as leaked."""


class VllmStrategy(InferStrategy):
    """Infer strategy `vllm`, see the module docstring. All methods are called on one event loop."""

    metric_kinds = KINDS

    def __init__(self, config: StrategyConfig) -> None:
        super().__init__(config)
        if not isinstance(config, VllmConfig):
            raise TypeError(f"expected VllmConfig, got {type(config).__name__}")
        self._settings: VllmConfig = config
        self._engine: AsyncLLM | None = None
        self._processes: VllmProcesses | None = None
        self._weights: EngineWeights | None = None
        self._server: EndpointServer | None = None
        self._running: dict[str, asyncio.Task[Completion]] = {}
        self._outputs: dict[str, list[VllmOutput]] = {}
        """Outputs of each running request, by request id."""
        self._metrics = VllmMetrics()
        self._updating = asyncio.Lock()
        self._image_processing = ThreadPoolExecutor(1, thread_name_prefix="vllm-images")
        """One thread, so that requests enter the engine in the order of arrival."""
        self._version = 0
        self._asleep, self._stale = False, config.quantization is not None
        """`_stale`: True from sleep, or from a start without weights, until the next weight update."""

    # -- life ----------------------------------------------------------------------------------------------------------

    @override
    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        if self._engine is not None:
            raise RuntimeError("the engine was started twice")
        self._mesh, self._who = mesh, f"{mesh.role} rank {mesh.rank}"
        # The adapter gets the role's name, so HTTP clients do not get the base model by mistake.
        name = mesh.role if model.lora is None else f"{mesh.role}-base"
        self._server = EndpointServer(name, self._settings.endpoint_host)
        self._server.listen()
        # Import before `launch`: vLLM stores import errors, whose tracebacks keep all frames alive. The engine must not
        # be in one of these frames.
        await asyncio.to_thread(importlib.import_module, "vllm.v1.engine.async_llm")
        launched = await asyncio.to_thread(launch, self._settings, model, mesh, self._metrics)
        engine = self._engine = launched.engine
        self._files, self._layout = launched.files, launched.layout
        self._max_model_len = int(engine.model_config.max_model_len)
        try:
            several_nodes = mesh.part is not None
            processes = self._processes = VllmProcesses(
                engine, self._who, self._settings.data_parallel_size, several_nodes=several_nodes
            )
            if model.lora is not None:
                self._weights = AdapterWeights(processes, mesh.role, model.lora)
            else:
                devices = () if several_nodes else slot_devices(mesh)
                self._weights = ModelWeights(processes, self._settings.bucket_mib << 20, devices)
            processor = self._files.processor
            media_token_ids = () if processor is None else processor.media_token_ids
            await while_alive(engine, engine.collective_rpc("roll_prepare", args=(media_token_ids,)))
            await engine.update_weight_version("0")
            await engine.get_supported_tasks()  # fetched once here, so that requests enter in the order of arrival
            if self._stale:
                await engine.pause_generation(mode="keep", clear_cache=False)  # HTTP requests wait for the first update
            await self._server.start(engine, launched.arguments)
        finally:
            launched.release_files()

    @override
    async def stop(self) -> None:
        engine, self._engine = self._engine, None
        self._image_processing.shutdown(wait=False, cancel_futures=True)
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        if self._server is not None:
            await self._server.stop()
        if engine is None:
            return
        if engine.output_handler is not None:
            engine.output_handler.cancel()  # otherwise it logs the end as an error, with a traceback
        await asyncio.to_thread(engine.shutdown, SHUTDOWN_S)
        if self._weights is not None:
            self._weights.close()
        # Drop all references: an engine that lives until interpreter exit shuts down again when it is collected, after
        # its modules are gone.
        self._server = self._weights = self._processes = None

    @override
    async def sleep(self) -> None:
        engine = self._ready
        if self._asleep or not self._settings.sleep_level:
            return

        async def release() -> None:
            if self._on_host:
                await engine.pause_generation(mode="abort", clear_cache=True)
                await engine.pause_generation(mode="keep", clear_cache=False)  # vLLM 0.33 would reject HTTP requests
                await engine.collective_rpc("roll_release_cache")
            else:
                await engine.sleep(level=self._settings.sleep_level, mode="abort")

        if self._weights is not None:
            self._weights.forget()
        await while_alive(engine, release())
        self._asleep = self._stale = True

    @override
    async def wake(self) -> None:
        engine = self._ready
        if not self._asleep:
            return

        async def acquire() -> None:
            await engine.wake_up()
            await engine.pause_generation(mode="keep", clear_cache=False)

        if not self._on_host:
            await while_alive(engine, acquire())
        # The engine stays paused until the next weight update, because its weights are stale.
        self._asleep = False

    @override
    def endpoint(self) -> str | None:
        return self._server.url or None if self._server is not None else None

    @override
    def metrics(self) -> Mapping[str, float]:
        return self._metrics.take()

    @property
    def _on_host(self) -> bool:
        return self._mesh.device.partition(":")[0] == "cpu"

    @property
    def _adapter(self) -> Any:
        """`LoRARequest` of the loaded adapter; None if requests use the model itself."""
        return self._processes.adapter if self._processes is not None else None

    @property
    def _ready(self) -> AsyncLLM:
        if self._engine is None:
            raise RuntimeError("the engine is not running: call `start` first, and do not use it after `stop`")
        return self._engine

    # -- weights -------------------------------------------------------------------------------------------------------

    @override
    async def update_weights(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool = False
    ) -> WeightReceipt:
        engine, weights = self._ready, self._weights
        if weights is None or self._asleep:
            raise RuntimeError("the engine is asleep: call `wake` before `update_weights`")
        digests = await while_alive(engine, self._update(engine, weights, version, manifest, tensors))
        if self._server is not None and (adapter := self._adapter) is not None:
            self._server.serve_adapter(adapter)
        self._stale = False
        return WeightReceipt(version=version, digests=digests, role=self._mesh.role, rank=self._mesh.rank)

    async def _update(
        self,
        engine: AsyncLLM,
        weights: EngineWeights,
        version: int,
        manifest: WeightManifest,
        tensors: Iterable[tuple[str, Tensor]],
    ) -> Mapping[str, str]:
        """Replace the weights and return their digests. Afterwards the engine runs, even if it was paused.

        If loading fails, the engine stays paused, because it may have weights of two versions.
        """
        async with self._updating:
            check_version(self._who, version, self._version, manifest)
            await weights.compare(manifest)
            await engine.pause_generation(mode="keep", clear_cache=True)
            await weights.load(Incoming(self._who, manifest, iter(tensors)))
            digests = await weights.digests(manifest)
            # While the engine is paused: a token sampled after this point must get the new version.
            self._version = version
            for outputs in self._outputs.values():
                for output in outputs:
                    output.weights_changed(version)
            await engine.resume_generation()
        return digests

    # -- requests ------------------------------------------------------------------------------------------------------

    @override
    async def generate(self, request: GenerateRequest) -> Completion:
        _ = self._ready
        if self._stale:
            raise RuntimeError("the engine has no weights, or is stale after sleep: update its weights first")
        limit = f"the engine's max_model_len {self._max_model_len}"
        check_request(
            request,
            vocab_size=self._files.vocab_size,
            max_tokens=self._max_model_len,
            limit=limit,
            routed_experts=self._layout is not None,
            has_tokenizer=bool(self._files.tokenizer),
            images=self._files.processor is not None,
        )
        check_served(request)
        if request.media and self._on_host and self._ready.model_config.is_mm_prefix_lm:
            raise UnsupportedError(
                f"request {request.id!r}: tokens of an image attend to each other in both directions in this model, but"
                " not in vLLM on a CPU, so that logprobs would be wrong: use strategy hf_infer"
            )
        if self._files.processor is not None:
            self._files.processor.check(request)
        if request.id in self._running:
            raise DataError(f"request {request.id!r}: a request with this id is running; ids must be unique")
        task = asyncio.create_task(self._complete(request), name=f"vllm-{request.id}")
        self._running[request.id] = task
        try:
            return await task
        finally:
            del self._running[request.id]

    @override
    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        engine = self._ready
        chosen = {request_id: self._running[request_id] for request_id in ids if request_id in self._running}
        pending = set(chosen.values())
        while pending:
            outputs = [
                one
                for request_id, task in chosen.items()
                if task in pending
                for one in self._outputs.get(request_id, ())
            ]
            with engine_errors():
                await engine.abort([one.name for one in outputs])
            _, pending = await asyncio.wait(pending, timeout=ABORT_INTERVAL_S)
        return [task.result() for task in chosen.values() if not task.cancelled() and task.exception() is None]

    @override
    async def progress(self) -> list[Completion]:
        running = self._outputs.items()
        return [Completion(id=id, outputs=tuple(output.completion() for output in outputs)) for id, outputs in running]

    async def _complete(self, request: GenerateRequest) -> Completion:
        outputs = [VllmOutput(request, index, self._version, self._layout) for index in range(request.n)]
        self._outputs[request.id] = outputs
        tasks: list[asyncio.Task[None]] = []
        try:
            prompt = await self._prompt(request)
            tasks = [asyncio.create_task(self._generate(output, prompt)) for output in outputs]
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del self._outputs[request.id]
            # vLLM keeps a request whose call is cancelled while vLLM is still receiving it.
            left = [output.name for output in outputs if not output.finished]
            if left and self._engine is not None:
                with contextlib.suppress(EngineDiedError), engine_errors():
                    await self._engine.abort(left)
        completed = tuple(output.completion() for output in outputs)
        first = outputs[0]
        return Completion(
            id=request.id, outputs=completed, prompt_logprobs=first.prompt_logprobs, prompt_topk=first.prompt_topk
        )

    async def _prompt(self, request: GenerateRequest) -> Any:
        """vLLM's input for the prompt. Raises `DataError`."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input

        renderer, processor = self._ready.renderer, self._files.processor
        if not request.media or processor is None:
            return tokens_input(request.prompt_ids.tolist())
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._image_processing, media_input, renderer, request, processor)
        except DataError:
            raise
        except (VLLMClientError, ValueError) as error:
            raise DataError(f"request {request.id!r}: vLLM rejects its images or videos: {error}") from error

    async def _generate(self, output: VllmOutput, prompt: Any) -> None:
        """Generate one output until vLLM finishes it. Raises `DataError`, `EngineDiedError`, `RollError`."""
        from vllm.exceptions import VLLMClientError

        request = output.request
        try:
            with engine_errors():
                async for delta in self._ready.generate(
                    prompt,
                    sampling_params(request, output.index, self._files.end_ids),
                    output.name,
                    lora_request=self._adapter,
                    priority=request.priority,
                ):
                    output.append(delta)
        except (VLLMClientError, ValueError) as error:
            raise DataError(f"request {request.id!r}: {error}") from error
        if not output.finished:
            raise RollError(f"{self._who}: vLLM ended request {output.name!r} without a finish reason")
