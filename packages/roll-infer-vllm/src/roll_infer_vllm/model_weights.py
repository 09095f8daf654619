"""Whole models on their way into the engine: bucket by bucket, by vLLM's own weight transfer interface."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.errors import CorruptTensorError, MissingTensorError, UnexpectedTensorError
from roll_core.modeling.buckets import BucketWriter
from roll_infer_vllm.updates import Loader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.engine.async_llm import AsyncLLM

    from roll_core.modeling.buckets import Incoming
    from roll_core.types import TensorEntry, WeightManifest


class ModelWeights(Loader):
    """Every tensor of the model, in place."""

    def __init__(self, engine: AsyncLLM, who: str, bucket_bytes: int) -> None:
        self._engine, self._who = engine, who
        self._writer = BucketWriter(bucket_bytes)

    @override
    async def compare(self, manifest: WeightManifest) -> None:
        entries = [(entry.name, list(entry.shape)) for entry in manifest.tensors]
        answers = await self._engine.collective_rpc("roll_compare", args=(entries,))
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

    @override
    async def load(self, incoming: Incoming) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._engine
        await engine.start_weight_update()
        try:
            following = await asyncio.to_thread(next, incoming, None)
            while following is not None:
                bucket, following = await asyncio.to_thread(self._writer.fill, incoming, following)
                await engine.update_weights(WeightTransferUpdateRequest(bucket.plain()))
        finally:
            await engine.finish_weight_update()
        incoming.refuse_missing()

    @override
    async def digests(self, entries: Sequence[TensorEntry]) -> list[Mapping[str, str]]:
        names = [entry.name for entry in entries]
        found: list[Mapping[str, str]] = await self._engine.collective_rpc("roll_digests", args=(names,))
        return found

    @override
    def close(self) -> None:
        self._writer.close()
