"""Weight updates on the worker's side: compare the manifest, pause, load, read digests back, resume."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from roll_core.spec.weights import check_version
from roll_core.types import WeightReceipt
from roll_modeling.buckets import Incoming

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor
    from vllm.v1.engine.async_llm import AsyncLLM

    from roll_core.spec.model import MeshInfo
    from roll_core.types import WeightManifest


class Loader(ABC):
    """Loads what a weight update sends: a whole model, or a LoRA adapter."""

    @abstractmethod
    async def compare(self, manifest: WeightManifest) -> None:
        """Raise `WeightSyncError` if the manifest does not match the engine. Changes nothing."""

    @abstractmethod
    async def load(self, incoming: Incoming) -> None:
        """Load all tensors. Raises `WeightSyncError`; the engine can take the next update also after an error."""

    @abstractmethod
    async def digests(self, manifest: WeightManifest) -> list[Mapping[str, str]]:
        """Digests of the loaded tensors by name, one mapping for each engine process."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of loading. Idempotent."""


class WeightUpdates:
    """Applies weight updates to one engine, one after the other."""

    def __init__(self, engine: AsyncLLM, mesh: MeshInfo, loader: Loader) -> None:
        self._engine, self._mesh, self._loader = engine, mesh, loader
        self._alone = asyncio.Lock()
        self.version = 0
        """Version of the loaded weights."""

    async def apply(
        self,
        version: int,
        manifest: WeightManifest,
        tensors: Iterable[tuple[str, Tensor]],
        changed: Callable[[int], None],
    ) -> WeightReceipt:
        """Update the weights, see `InferStrategy.update_weights`. Afterwards the engine runs, even if it was paused.

        If loading fails, the engine stays paused, because it may hold weights of two versions.

        Calls `changed(version)` after the weights are loaded and before the engine generates with them.
        """
        who = f"{self._mesh.role} rank {self._mesh.rank}"
        async with self._alone:
            check_version(who, version, self.version, manifest)
            await self._loader.compare(manifest)
            engine = self._engine
            await engine.pause_generation(mode="keep", clear_cache=True)
            await self._loader.load(Incoming(who, manifest, iter(tensors)))
            await engine.update_weight_version(str(version))
            self.version = version
            changed(version)
            answers = await self._loader.digests(manifest)
            await engine.resume_generation()
        digests = {name: digest for answer in answers for name, digest in answer.items()}
        return WeightReceipt(version=version, digests=digests, role=self._mesh.role, rank=self._mesh.rank)

    def close(self) -> None:
        """Release the resources of loading."""
        self._loader.close()
