"""Part of a replica on a further node: the engine processes there, which the executor on the first node drives.

first node                                               further node
----------                                               ------------
VllmStrategy: AsyncLLM, engine core, its ranks  ──────►  VllmFollower: the other ranks
              calls, batches, buckets of weights         torch.distributed at `ReplicaPart.master_addr`
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.spec.infer import InferFollower
from roll_infer_vllm.config import VllmConfig
from roll_infer_vllm.launch import launch_follower
from roll_infer_vllm.watchdog import engine_died

if TYPE_CHECKING:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.model import MeshInfo, ModelSpec


class VllmFollower(InferFollower):
    """The processes of `vllm serve --headless`, see the module docstring."""

    def __init__(self, config: StrategyConfig) -> None:
        super().__init__(config)
        if not isinstance(config, VllmConfig):
            raise TypeError(f"expected VllmConfig, got {type(config).__name__}")
        self._settings: VllmConfig = config
        self._executor: MultiprocExecutor | None = None

    @override
    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        self._executor = await asyncio.to_thread(launch_follower, self._settings, model, mesh)

    @override
    async def check(self) -> None:
        if self._executor is not None and self._executor.is_failed:
            raise engine_died()

    @override
    async def stop(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            await asyncio.to_thread(executor.shutdown)
