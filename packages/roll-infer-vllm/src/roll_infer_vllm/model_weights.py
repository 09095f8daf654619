"""Weight updates of whole models, sent bucket by bucket through vLLM's weight transfer interface."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.errors import WeightSyncError
from roll_infer_vllm.updates import Loader
from roll_modeling.buckets import BucketWriter
from roll_modeling.comparing import entries, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.engine.async_llm import AsyncLLM

    from roll_core.types import WeightManifest
    from roll_modeling.buckets import Incoming


class ModelWeights(Loader):
    """Loader that replaces every tensor of the model in place."""

    def __init__(self, engine: AsyncLLM, who: str, bucket_bytes: int, devices: Sequence[str]) -> None:
        """`bucket_bytes` is the bucket size; `devices` are the devices of the engine processes."""
        self._engine, self._who = engine, who
        self._writer = BucketWriter(bucket_bytes, devices)

    @override
    async def compare(self, manifest: WeightManifest) -> None:
        answers = await self._engine.collective_rpc("roll_compare", args=(entries(manifest),))
        refuse(self._who, "vLLM", manifest, answers)

    @override
    async def load(self, incoming: Incoming) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._engine
        await engine.start_weight_update()
        try:
            following = await asyncio.to_thread(next, incoming, None)
            trial = self._writer.trial(following[1]) if following is not None else None
            if trial is not None:
                self._writer.check_trial(await engine.collective_rpc("roll_opening_failure", args=(trial.plain(),)))
            while following is not None:
                bucket, following = await asyncio.to_thread(self._writer.fill, incoming, following)
                await engine.update_weights(WeightTransferUpdateRequest(bucket.plain()))
            for failure in await engine.collective_rpc("roll_load_failure"):
                if failure:
                    raise WeightSyncError(f"{self._who}: a process of vLLM's failed to load weights: {failure}")
        finally:
            self._writer.release()
            await engine.finish_weight_update()
        incoming.refuse_missing()

    @override
    async def digests(self, manifest: WeightManifest) -> list[Mapping[str, str]]:
        names = [entry.name for entry in manifest.tensors]
        found: list[Mapping[str, str]] = await self._engine.collective_rpc("roll_digests", args=(names,))
        return found

    @override
    def close(self) -> None:
        self._writer.close()
