"""A publish, from the worker's side: compare, pause, load, ask what is held, resume."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from roll_core.spec.weights import refuse_stale
from roll_core.types import WeightReceipt
from roll_modeling.buckets import Incoming

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor
    from vllm.v1.engine.async_llm import AsyncLLM

    from roll_core.spec.model import MeshInfo
    from roll_core.types import WeightManifest


class Loader(ABC):
    """What is published: a whole model, or adapters."""

    @abstractmethod
    async def compare(self, manifest: WeightManifest) -> None:
        """Refuse a manifest that is not this engine's, before anything is touched. Raises `WeightSyncError`."""

    @abstractmethod
    async def load(self, incoming: Incoming) -> None:
        """All tensors. Also after an error the engine is left ready for the next update. Raises `WeightSyncError`."""

    @abstractmethod
    async def digests(self, manifest: WeightManifest) -> list[Mapping[str, str]]:
        """Of what the engine's processes hold under these names, by process."""

    @abstractmethod
    def close(self) -> None:
        """Give back what loading took. May be called several times."""


class WeightUpdates:
    """The updates of one engine, one after the other."""

    def __init__(self, engine: AsyncLLM, mesh: MeshInfo, loader: Loader) -> None:
        self._engine, self._mesh, self._loader = engine, mesh, loader
        self._alone = asyncio.Lock()
        self.version = 0
        """That the engine holds."""

    async def apply(
        self,
        version: int,
        manifest: WeightManifest,
        tensors: Iterable[tuple[str, Tensor]],
        changed: Callable[[int], None],
    ) -> WeightReceipt:
        """See `InferStrategy.update_weights`. The engine runs afterwards, whether it was paused before or not.

        Where it has begun to load and fails the engine stays paused, as it may hold a part of each version.

        `changed` is called with the version once its weights are in, before they draw.
        """
        who = f"{self._mesh.role} rank {self._mesh.rank}"
        async with self._alone:
            refuse_stale(who, version, self.version, manifest)
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
        """Give back what loading took."""
        self._loader.close()
