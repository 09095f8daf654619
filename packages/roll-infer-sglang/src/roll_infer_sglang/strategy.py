"""Infer strategy `sglang`: one replica of SGLang as a server process, driven from the worker's event loop.

worker (this module)                       SGLang's processes (with `sampler` and `loader` of this package)
--------------------                       ----------------------------------------------------------------
generate()        -- /generate --------->  one request per output (`requests`)
update_weights()  -- /abort_request ---->  running requests end; ours wait in the worker, HTTP clients' end for good
                  -- compare, load ----->  `loader` loads buckets with the model's own loader
                  <- digests ------------  `held` reads the loaded weights back
                  -- /flush_cache ------>  then interrupted requests are submitted again, with their tokens so far
sleep(), wake()   -- /release_…, ------->  releases the KV cache; on an accelerator weights too
                     /resume_memory_occupation

Requests are aborted and submitted again because SGLang can clear its KV cache only when no request is running. LoRA
adapters follow the same steps, but SGLang loads them by itself (`adapter_weights`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.spec.infer import InferStrategy
from roll_core.spec.requests import check_request
from roll_core.spec.weights import check_version
from roll_core.types import WeightReceipt
from roll_core.weights.device_memory import slot_devices
from roll_infer_sglang.adapter_weights import AdapterWeights
from roll_infer_sglang.config import SglangConfig
from roll_infer_sglang.engine_metrics import KINDS, EngineMetrics
from roll_infer_sglang.launch import launch
from roll_infer_sglang.model_weights import ModelWeights
from roll_infer_sglang.plugin import CAPABILITIES
from roll_infer_sglang.requests import Requests
from roll_infer_sglang.sampling import check_served
from roll_infer_sglang.transfer import Published, Transfer
from roll_modeling.buckets import Incoming

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.types import Completion, GenerateRequest, WeightManifest
    from roll_infer_sglang.server import Server

IDLE_S = 30
"""Seconds for SGLang to become idle after all requests have been answered."""


class SglangStrategy(InferStrategy):
    """Infer strategy `sglang`, see the module docstring. All methods are called on one event loop."""

    capabilities = CAPABILITIES
    metric_kinds = KINDS

    def __init__(self, config: StrategyConfig) -> None:
        super().__init__(config)
        if not isinstance(config, SglangConfig):
            raise TypeError(f"sglang takes a SglangConfig, not a {type(config).__name__}")
        self._settings: SglangConfig = config
        self._server: Server | None = None
        self._metrics = EngineMetrics()
        self._alone = asyncio.Lock()
        """Lock for operations that end requests: abort, sleep and weight updates."""
        self._asleep = self._stale = False
        """`_stale`: True from sleep until the next weight update."""
        self._torn = False
        """True from the start of loading an update until an update completes: weights may be of two versions."""

    # -- life ----------------------------------------------------------------------------------------------------------

    @override
    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        if self._server is not None:
            raise RuntimeError("the engine was started twice")
        self._mesh, self._replays = mesh, model.router_replay
        num_slots = self._settings.tp_size or mesh.num_slots
        launched = await launch(self._settings, model, mesh, num_slots)
        server = self._server = launched.server
        self._vocab_size, self._limit = launched.files.vocab_size, launched.limit
        transfer = Transfer(self._who, server, num_slots)
        self._published: Published
        if model.lora is not None:
            self._published = AdapterWeights(transfer, server, self._who, mesh.role, model.lora)
        else:
            devices = slot_devices(mesh, num_slots)
            self._published = ModelWeights(transfer, self._who, self._settings.bucket_mib << 20, devices)
        priorities = self._settings.enable_priority_scheduling
        self._requests = Requests(
            server, self._who, model, launched.files, self._metrics, priorities=priorities, routing=launched.routing
        )

    @override
    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        await self._requests.close()
        await server.stop()
        self._published.close()

    @override
    async def sleep(self) -> None:
        server = self._ready
        if self._asleep or not self._settings.sleep_level:
            return
        async with self._alone:
            await self._requests.abort(self._requests.ids)
            await self._requests.halt()
            await server.ask(f"/flush_cache?timeout={IDLE_S}", {})
            await server.ask("/release_memory_occupation", {"tags": self._leaving})
        self._asleep = self._stale = True

    @override
    async def wake(self) -> None:
        server = self._ready
        if not self._asleep:
            return
        await server.ask("/resume_memory_occupation", {"tags": self._leaving})
        # The engine stays halted until the next weight update, because its weights are stale.
        self._asleep = False

    @override
    def endpoint(self) -> str | None:
        return f"{self._ready.url}/v1"

    @override
    def metrics(self) -> Mapping[str, float]:
        return self._metrics.take()

    @property
    def _leaving(self) -> list[str]:
        """SGLang's tags of the memory that sleep releases. On a CPU weights cannot be offloaded."""
        return ["kv_cache"] if self._mesh.device.partition(":")[0] == "cpu" else ["kv_cache", "weights"]

    @property
    def _who(self) -> str:
        return f"{self._mesh.role} rank {self._mesh.rank}"

    @property
    def _ready(self) -> Server:
        if self._server is None:
            raise RuntimeError("the engine does not run: start it first, and not after stop")
        return self._server

    # -- requests ------------------------------------------------------------------------------------------------------

    @override
    async def generate(self, request: GenerateRequest) -> Completion:
        _ = self._ready
        if self._stale:
            raise RuntimeError("the engine has slept: weights have to be published to it before it generates")
        limit = f"the engine's context of {self._limit} tokens"
        check_request(
            request,
            vocab_size=self._vocab_size,
            max_tokens=self._limit,
            limit=limit,
            routed_experts=self._replays,
        )
        check_served(request)
        return await self._requests.generate(request)

    @override
    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        _ = self._ready
        async with self._alone:
            return await self._requests.abort(ids)

    @override
    async def progress(self) -> list[Completion]:
        return self._requests.progress()

    # -- weights -------------------------------------------------------------------------------------------------------

    @override
    async def update_weights(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool = False
    ) -> WeightReceipt:
        async with self._alone:
            server, requests, published = self._ready, self._requests, self._published
            if self._asleep:
                raise RuntimeError("the engine sleeps: wake it before its weights are updated")
            check_version(self._who, version, requests.version, manifest)
            try:
                await requests.halt()
                await published.compare(manifest)
                self._torn = True
                try:
                    await published.load(Incoming(self._who, manifest, iter(tensors)))
                    digests = await published.digests(manifest)
                finally:
                    await server.ask("/flush_cache", {})
                requests.version, requests.adapter = version, published.adapter
                self._stale = self._torn = False
            finally:
                if not (self._stale or self._torn):
                    await requests.go_on()
        return WeightReceipt(version=version, digests=digests, role=self._mesh.role, rank=self._mesh.rank)
