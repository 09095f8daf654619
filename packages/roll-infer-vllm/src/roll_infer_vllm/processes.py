"""Calls from the worker to vLLM's engine processes during a weight update; `worker.WorkerExtension` receives them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import WeightSyncError
from roll_modeling.engine_weights import EngineProcesses

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.engine.async_llm import AsyncLLM

    from roll_core.spec.model import LoraSpec
    from roll_modeling.engine_weights import Action

ADAPTER_ID = 1
"""vLLM's integer id of the single adapter."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM accepts; an adapter of another rank uses the next larger one."""


class VllmProcesses(EngineProcesses):
    """Engine processes of one `AsyncLLM`."""

    engine = "vLLM"

    def __init__(self, engine: AsyncLLM, who: str, data_parallel_size: int = 1, *, several_nodes: bool = False) -> None:
        self._engine, self.who, self._has_ranks = engine, who, data_parallel_size > 1
        self._several_nodes = several_nodes
        self.adapter: Any = None
        """`LoRARequest` of the loaded adapter; None before the first update, when an adapter would change nothing."""

    @override
    async def act(self, action: Action, argument: Any, *, version: int | None = None) -> list[Any]:
        if version is not None:
            await self._engine.update_weight_version(str(version))
        return await self._call("roll_act", action, argument)

    @override
    async def begin_update(self) -> None:
        await self._engine.start_weight_update()

    @override
    async def load_bucket(self, bucket: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._several_nodes:  # processes of other nodes cannot open the path
            bucket = {**bucket, "path": "", "content": await asyncio.to_thread(Path(bucket["path"]).read_bytes)}
        await self._engine.update_weights(WeightTransferUpdateRequest(bucket))

    @override
    async def finish_update(self) -> None:
        failures = await self._call("roll_load_failure")
        await self._engine.finish_weight_update()
        if failure := next(filter(None, failures), ""):
            raise WeightSyncError(f"{self.who}: a vLLM process failed to load weights: {failure}")

    @override
    async def load_adapter(self, name: str, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        fields = {"lora_name": name, "lora_int_id": ADAPTER_ID, "lora_path": str(folder)}
        try:
            await self._engine.add_lora(LoRARequest(**fields, load_inplace=True))
        except Exception as error:  # vLLM raises no specific type for errors in its processes
            raise WeightSyncError(f"{self.who}: vLLM rejected the adapter: {error}") from error
        self.adapter = LoRARequest(**fields)

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method in every process. Returns the results of the first data-parallel rank's processes first.

        `AsyncLLM.collective_rpc` calls the processes of all data-parallel ranks, but returns only the first one's
        results.
        """
        if not self._has_ranks:
            results: list[Any] = await self._engine.collective_rpc(method, args=arguments)
            return results
        call = ("collective_rpc", method, None, arguments, None)
        by_rank = await self._engine.engine_core.call_utility_all_async(*call)
        return [result for results in by_rank for result in results]


def adapter_arguments(lora: LoraSpec) -> Mapping[str, Any]:
    """Engine arguments for serving this single adapter. Raises `WeightSyncError` if its rank exceeds vLLM's maximum."""
    max_rank = next((rank for rank in RANKS if rank >= lora.max_rank), None)
    if max_rank is None:
        raise WeightSyncError(
            f"the largest rank of lora_rank and rank_pattern is {lora.max_rank}; vLLM serves adapters of rank"
            f" {RANKS[-1]} or less"
        )
    return {"max_lora_rank": max_rank, "max_loras": 1, "max_cpu_loras": 1}
