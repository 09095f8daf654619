"""`vllm`: one replica of vLLM's engine, in processes of its own, driven from the worker's event loop.

worker (this module)                         engine's processes (vLLM's, with `worker.WorkerExtension`)
--------------------                         ----------------------------------------------------------
generate()         -- AsyncLLM.generate -->  one request per output
update_weights()   -- pause, keep -------->  nothing is computed; running requests will recompute keys and values
                   -- buckets ------------>  `transfer.BucketTransfer` loads them, layer after layer
                   <- digests -------------  `held.Reader` reads back what is there
                   -- resume ------------->  on with the new weights
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import os
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import (
    ConfigError,
    ConfigProblem,
    CorruptTensorError,
    DataError,
    MissingTensorError,
    ModelError,
    RollError,
    StaleWeightsError,
    UnexpectedTensorError,
    UnsupportedError,
)
from roll_core.spec.infer import InferStrategy
from roll_core.spec.requests import check_request
from roll_core.types import Completion, WeightReceipt
from roll_infer_vllm.buckets import BucketWriter
from roll_infer_vllm.config import VllmConfig
from roll_infer_vllm.engine_environment import engine_environment, environment
from roll_infer_vllm.engine_metrics import KINDS, EngineMetrics, stat_logger
from roll_infer_vllm.model_files import ModelFiles, model_files
from roll_infer_vllm.plugin import CAPABILITIES
from roll_infer_vllm.registration import TRANSFER
from roll_infer_vllm.sampling import check_served, completion_output, flat_logprobs, sampling_params

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from vllm.v1.engine.async_llm import AsyncLLM

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.types import GenerateRequest, WeightManifest

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
CPU_CACHE_BYTES = 4 << 30
"""Of keys and values on a CPU, where nothing else is said: vLLM would take nearly all of the host's memory."""
ABORT_AGAIN_S = 0.05
"""vLLM ignores the abort of a request that it is still taking in."""


class VllmStrategy(InferStrategy):
    """See the module. All methods are called on one event loop."""

    capabilities = CAPABILITIES
    metric_kinds = KINDS

    def __init__(self, config: StrategyConfig) -> None:
        super().__init__(config)
        if not isinstance(config, VllmConfig):
            raise TypeError(f"vllm takes a VllmConfig, not a {type(config).__name__}")
        self._settings: VllmConfig = config
        self._engine: AsyncLLM | None = None
        self._version = 0
        self._running: dict[str, asyncio.Task[Completion]] = {}
        self._updating = asyncio.Lock()
        self._names: dict[str, list[str]] = {}
        """Of running requests, under which vLLM knows their outputs."""
        self._metrics = EngineMetrics()

    # -- life ----------------------------------------------------------------------------------------------------------

    @override
    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        if self._engine is not None:
            raise RuntimeError("the engine was started twice")
        self._mesh = mesh
        await asyncio.to_thread(self._start, model)
        self._writer = BucketWriter(self._settings.bucket_mib << 20)
        engine = self._ready
        await engine.collective_rpc("roll_prepare")
        await engine.update_weight_version("0")
        await engine.get_supported_tasks()  # asked once here, so that requests enter in the order in which they come

    @override
    async def stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await asyncio.to_thread(engine.shutdown)
        self._writer.close()

    def _start(self, model: ModelSpec) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        slots = self._settings.slots_per_worker()
        device = self._mesh.device.partition(":")[0]
        given = self._settings.engine_arguments()
        if device == "cpu":
            given.setdefault("enforce_eager", True)
            if "gpu_memory_utilization" not in given:
                given.setdefault("kv_cache_memory_bytes", CPU_CACHE_BYTES)
        variables = engine_environment(
            device,
            os.environ,
            num_threads=self._mesh.num_threads,
            num_slots=slots,
            compiles=not given.get("enforce_eager", False),
        )
        with environment(variables), model_files(model) as files:
            if device == "cpu":
                self._check_heads(files.head_size)
            arguments = self._arguments(model, files, given)
            self._files = files
            try:
                self._engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[stat_logger(self._metrics)])
            except (ValueError, RuntimeError, OSError, NotImplementedError, ImportError) as error:
                raise ModelError(
                    f"{self._who}: vLLM does not start with this model and strategy_config: {error}"
                ) from error
        self._max_model_len = int(self._engine.model_config.max_model_len)

    def _check_heads(self, size: int) -> None:
        """vLLM starts with heads that it cannot compute, and dies of the first request."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes = CPUAttentionBackend.get_supported_head_sizes()
        if size not in sizes:
            raise ModelError(
                f"{self._who}: the model's attention heads have size {size}; on a CPU vLLM takes"
                f" {', '.join(map(str, sizes))}. Another head_dim, or hf_infer, which takes any, would do"
            )

    def _arguments(self, model: ModelSpec, files: ModelFiles, given: Mapping[str, Any]) -> Any:
        """The engine's arguments, ours and the user's."""
        from vllm.engine.arg_utils import AsyncEngineArgs

        own: dict[str, Any] = {
            **files.arguments,
            "dtype": DTYPES[model.dtype],
            "seed": model.seed % 2**31,
            "trust_remote_code": model.trust_remote_code,
            "generation_config": "vllm",
            "distributed_executor_backend": "mp" if self._settings.slots_per_worker() > 1 else "uni",
            "worker_extension_cls": "roll_infer_vllm.worker.WorkerExtension",
            "weight_transfer_config": {"backend": TRANSFER},
            "disable_log_stats": True,  # vLLM's own loggers; ours counts
        }
        _check_known(given, {each.name for each in dataclasses.fields(AsyncEngineArgs)})
        try:
            return AsyncEngineArgs(**given, **own)
        except (ValueError, TypeError) as error:
            raise ModelError(f"{self._who}: vLLM refuses strategy_config: {error}") from error

    @property
    def _who(self) -> str:
        return f"{self._mesh.role} rank {self._mesh.rank}"

    @property
    def _ready(self) -> AsyncLLM:
        if self._engine is None:
            raise RuntimeError("the engine does not run: start it first, and not after stop")
        return self._engine

    # -- requests ------------------------------------------------------------------------------------------------------

    @override
    async def generate(self, request: GenerateRequest) -> Completion:
        _ = self._ready
        limit = f"the engine's max_model_len {self._max_model_len}"
        check_request(request, vocab_size=self._files.vocab_size, max_tokens=self._max_model_len, limit=limit)
        check_served(request)
        if request.params.stop and not request.params.ignore_eos:
            if not all(request.params.stop):
                raise DataError("stop strings: an empty string would end every response at once")
            if "tokenizer" not in self._files.arguments:
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
            names = [name for each, task in chosen.items() if task in waiting for name in self._names.get(each, ())]
            await engine.abort(names)
            _, waiting = await asyncio.wait(waiting, timeout=ABORT_AGAIN_S)
        return [task.result() for task in chosen.values() if not task.cancelled() and task.exception() is None]

    @override
    def metrics(self) -> Mapping[str, float]:
        return self._metrics.take()

    async def _complete(self, request: GenerateRequest) -> Completion:
        names = [f"{request.id}/{index}" for index in range(request.n)]
        self._names[request.id] = names
        drawing = [asyncio.create_task(self._draw(request, index, name)) for index, name in enumerate(names)]
        try:
            drawn = await asyncio.gather(*drawing)
        finally:
            for task in drawing:
                task.cancel()
            await asyncio.gather(*drawing, return_exceptions=True)
            del self._names[request.id]
        prompt_logprobs = flat_logprobs(drawn[0].prompt_logprobs) if request.prompt_logprobs else None
        outputs = tuple(completion_output(each.outputs[0], request, self._version) for each in drawn)
        return Completion(id=request.id, outputs=outputs, prompt_logprobs=prompt_logprobs)

    async def _draw(self, request: GenerateRequest, index: int, name: str) -> Any:
        """One output, by vLLM's last word on it."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        final = None
        try:
            async for each in self._ready.generate(
                tokens_input(request.prompt_ids.tolist()),
                sampling_params(request, index, self._files.end_ids),
                name,
                priority=request.priority,
            ):
                final = each
        except EngineDeadError as error:
            raise RollError(f"{self._who}: vLLM's engine is dead; its own messages above say why") from error
        except (VLLMClientError, ValueError) as error:
            raise DataError(f"request {request.id!r}: {error}") from error
        if final is None:
            raise RollError(f"{self._who}: vLLM ended request {name!r} without an answer")
        return final

    # -- weights -------------------------------------------------------------------------------------------------------

    @override
    async def update_weights(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool = False
    ) -> WeightReceipt:
        async with self._updating:
            if version < self._version or version != manifest.version:
                raise StaleWeightsError(
                    f"{self._who}: was sent version {version} with a manifest of version {manifest.version}"
                    f" while it holds version {self._version}"
                )
            await self._compare(manifest)
            engine = self._ready
            await engine.pause_generation(mode="keep", clear_cache=True)
            try:
                await self._load(manifest, iter(tensors))
                await engine.update_weight_version(str(version))
                self._version = version
                names = [entry.name for entry in manifest.tensors]
                answers = await engine.collective_rpc("roll_digests", args=(names,))
            finally:
                await engine.resume_generation()
        digests = {name: digest for answer in answers for name, digest in answer.items()}
        return WeightReceipt(version=version, digests=digests, role=self._mesh.role, rank=self._mesh.rank)

    async def _load(self, manifest: WeightManifest, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """All tensors, bucket by bucket. Also after an error the engine is left ready for the next update."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._ready
        incoming = _Incoming(self._who, manifest, tensors)
        await engine.start_weight_update()
        try:
            following = await asyncio.to_thread(next, incoming, None)
            while following is not None:
                bucket, following = await asyncio.to_thread(self._writer.fill, incoming, following)
                await engine.update_weights(WeightTransferUpdateRequest(bucket.plain()))
        finally:
            await engine.finish_weight_update()
        incoming.refuse_missing()

    async def _compare(self, manifest: WeightManifest) -> None:
        """Refuse a manifest that is not this model's, before anything is touched."""
        entries = [(entry.name, list(entry.shape)) for entry in manifest.tensors]
        answers = await self._ready.collective_rpc("roll_compare", args=(entries,))
        for answer in answers:
            if answer["unknown"]:
                raise UnexpectedTensorError(
                    f"{self._who}: was sent {answer['unknown'][0]}, which vLLM's model does not have, or holds in a"
                    f" form that cannot be read back ({len(answer['unknown'])} such tensors)"
                )
            for name, shape in answer["shapes"].items():
                sent = next(list(entry.shape) for entry in manifest.tensors if entry.name == name)
                raise CorruptTensorError(f"{self._who}: {name} is {sent} in the manifest, and {shape} in vLLM's model")
            if answer["missing"]:
                raise MissingTensorError(
                    f"{self._who}: {answer['missing'][0]} is not in the manifest of version {manifest.version}"
                    f" ({len(answer['missing'])} such tensors)"
                )


class _Incoming:
    """The sender's tensors, each held against its entry in the manifest."""

    def __init__(self, who: str, manifest: WeightManifest, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._who, self._version, self._tensors = who, manifest.version, tensors
        self._expected = {entry.name: entry for entry in manifest.tensors}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        from roll_core.spec.weights import dtype_name

        name, tensor = next(self._tensors)
        entry = self._expected.pop(name, None)
        if entry is None:
            raise UnexpectedTensorError(f"{self._who}: was sent {name}, which the manifest does not have, or has once")
        if dtype_name(tensor) != entry.dtype or tuple(tensor.shape) != entry.shape:
            raise CorruptTensorError(
                f"{self._who}: {name} arrived as {dtype_name(tensor)} {list(tensor.shape)}; the manifest says"
                f" {entry.dtype} {list(entry.shape)}"
            )
        return name, tensor

    def refuse_missing(self) -> None:
        """Raise `MissingTensorError` for what did not come."""
        if self._expected:
            raise MissingTensorError(
                f"{self._who}: {min(self._expected)} was not sent of version {self._version}"
                f" ({len(self._expected)} such tensors)"
            )


def _check_known(given: Mapping[str, Any], known: set[str]) -> None:
    """The installed engine may be another release than the one whose arguments `check` knows."""
    problems = []
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else ""
            problems.append(
                ConfigProblem(
                    where="strategy_config", key=name, message="the installed vLLM has no such argument", hint=hint
                )
            )
    if problems:
        raise ConfigError(problems)
