"""Infer strategy `sglang`: one replica of SGLang as a server process, driven from the worker's event loop.

worker (this module)                       SGLang's processes (with `sampler` and `processes.act`)
--------------------                       ----------------------------------------------------------------
generate()        -- /generate --------->  one request per output (`requests`)
update_weights()  -- /abort_request ---->  running requests end; ours wait in the worker, HTTP clients' end for good
                  -- compare, load ----->  `loaded_model` loads buckets with the model's own loader
                  <- digests ------------  `loaded_model` reads the loaded weights back
                  -- /flush_cache ------>  then interrupted requests are submitted again, with their tokens so far
sleep(), wake()   -- /release_…, ------->  releases the KV cache; on an accelerator weights too
                     /resume_memory_occupation

Requests are aborted and submitted again because SGLang can clear its KV cache only when no request is running. LoRA
adapters follow the same steps, but SGLang loads them by itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.spec.infer import InferStrategy, check_request
from roll_core.spec.weights import check_version
from roll_core.types import WeightReceipt
from roll_infer_sglang.config import SglangConfig
from roll_infer_sglang.engine_metrics import SglangMetrics
from roll_infer_sglang.launch import launch
from roll_infer_sglang.processes import SglangProcesses
from roll_infer_sglang.requests import Requests
from roll_infer_sglang.sampling import check_served
from roll_modeling.engine_metrics import KINDS
from roll_modeling.engine_weights import AdapterWeights, EngineWeights, ModelWeights
from roll_weight_transports.buckets import Incoming
from roll_weight_transports.device_memory import slot_devices

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.types import Completion, GenerateRequest, WeightManifest
    from roll_infer_sglang.server import SglangServer

IDLE_S = 30
"""Seconds for SGLang to become idle after all requests have been answered."""


class SglangStrategy(InferStrategy):
    """Infer strategy `sglang`, see the module docstring. All methods are called on one event loop."""

    metric_kinds = KINDS

    def __init__(self, config: StrategyConfig) -> None:
        super().__init__(config)
        if not isinstance(config, SglangConfig):
            raise TypeError(f"expected SglangConfig, got {type(config).__name__}")
        self._settings: SglangConfig = config
        self._server: SglangServer | None = None
        self._metrics = SglangMetrics()
        self._exclusive = asyncio.Lock()
        """Lock for operations that end requests: abort, sleep and weight updates."""
        self._version = 0
        self._asleep = self._stale = False
        """`_stale`: True from sleep until the next weight update."""
        self._incomplete = False
        """True from the start of loading an update until an update completes: weights may be of two versions."""

    # -- life ----------------------------------------------------------------------------------------------------------

    @override
    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        if self._server is not None:
            raise RuntimeError("the engine was started twice")
        self._mesh, self._who, self._replays = mesh, f"{mesh.role} rank {mesh.rank}", model.router_replay
        num_slots = self._settings.tp_size or mesh.num_slots
        launched = await launch(self._settings, model, mesh, num_slots)
        server = self._server = launched.server
        self._files, self._limit, self._images = launched.files, launched.limit, launched.images
        processes = self._processes = SglangProcesses(server, self._who, num_slots)
        self._weights: EngineWeights
        if model.lora is not None:
            self._weights = AdapterWeights(processes, mesh.role, model.lora)
        else:
            devices = slot_devices(mesh, num_slots)
            self._weights = ModelWeights(processes, self._settings.bucket_mib << 20, devices)
        priorities = self._settings.enable_priority_scheduling
        self._requests = Requests(
            server, self._who, model, launched.files, self._metrics, priorities=priorities, layout=launched.layout
        )

    @override
    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        await self._requests.close()
        await server.stop()
        self._weights.close()

    @override
    async def sleep(self) -> None:
        server = self._ready
        if self._asleep or not self._settings.sleep_level:
            return
        self._weights.forget()
        async with self._exclusive:
            await self._requests.abort()
            await self._requests.interrupt()
            await server.request(f"/flush_cache?timeout={IDLE_S}", {})
            await server.request("/release_memory_occupation", {"tags": self._released})
        self._asleep = self._stale = True

    @override
    async def wake(self) -> None:
        server = self._ready
        if not self._asleep:
            return
        await server.request("/resume_memory_occupation", {"tags": self._released})
        # The engine stays interrupted until the next weight update, because its weights are stale.
        self._asleep = False

    @override
    def endpoint(self) -> str | None:
        return f"{self._ready.url}/v1"

    @override
    def metrics(self) -> Mapping[str, float]:
        return self._metrics.take()

    @property
    def _released(self) -> list[str]:
        """SGLang's tags of the memory that sleep releases. On a CPU weights cannot be offloaded."""
        return ["kv_cache"] if self._mesh.device.partition(":")[0] == "cpu" else ["kv_cache", "weights"]

    @property
    def _ready(self) -> SglangServer:
        if self._server is None:
            raise RuntimeError("the engine is not running: call `start` first, and do not use it after `stop`")
        return self._server

    # -- requests ------------------------------------------------------------------------------------------------------

    @override
    async def generate(self, request: GenerateRequest) -> Completion:
        _ = self._ready
        if self._stale:
            raise RuntimeError("the engine is stale after sleep: update its weights first")
        check_request(
            request,
            vocab_size=self._files.vocab_size,
            max_tokens=self._limit,
            limit=f"the engine's context of {self._limit} tokens",
            routed_experts=self._replays,
            has_tokenizer=bool(self._files.tokenizer),
            images=self._images is not None,
        )
        check_served(request)
        if self._images is not None:
            self._images.check(request)
        return await self._requests.generate(request)

    @override
    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        _ = self._ready
        async with self._exclusive:
            return await self._requests.abort(ids)

    @override
    async def progress(self) -> list[Completion]:
        return self._requests.progress()

    # -- weights -------------------------------------------------------------------------------------------------------

    @override
    async def update_weights(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool = False
    ) -> WeightReceipt:
        async with self._exclusive:
            server, requests, weights = self._ready, self._requests, self._weights
            if self._asleep:
                raise RuntimeError("the engine is asleep: call `wake` before `update_weights`")
            check_version(self._who, version, self._version, manifest)
            try:
                await requests.interrupt()
                await weights.compare(manifest)
                self._incomplete = True
                try:
                    await weights.load(Incoming(self._who, manifest, iter(tensors)))
                    digests = await weights.digests(manifest)
                finally:
                    await server.request("/flush_cache", {})
                self._version, requests.adapter = version, self._processes.adapter
                self._stale = self._incomplete = False
            finally:
                if not (self._stale or self._incomplete):
                    await requests.resume()
        return WeightReceipt(version=version, digests=digests, role=self._mesh.role, rank=self._mesh.rank)
