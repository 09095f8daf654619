"""Weight updates of whole models, sent bucket by bucket and loaded in place."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_infer_sglang.transfer import Published, joined
from roll_modeling.buckets import BucketWriter
from roll_modeling.comparing import entries, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.types import WeightManifest
    from roll_infer_sglang.transfer import Transfer
    from roll_modeling.buckets import Incoming


class ModelWeights(Published):
    """Loader that replaces every tensor of the model."""

    def __init__(self, transfer: Transfer, who: str, bucket_bytes: int, devices: Sequence[str]) -> None:
        """`bucket_bytes` is the bucket size; `devices` are the devices of the engine processes."""
        self._transfer, self._who = transfer, who
        self._writer = BucketWriter(bucket_bytes, devices)

    @override
    async def compare(self, manifest: WeightManifest) -> None:
        answers = await self._transfer.act("compare", tensors=entries(manifest))
        refuse(self._who, "SGLang", manifest, answers)

    @override
    async def load(self, incoming: Incoming) -> None:
        following = await asyncio.to_thread(next, incoming, None)
        trial = self._writer.trial(following[1]) if following is not None else None
        if trial is not None:
            self._writer.check_trial(await self._transfer.act("open", bucket=trial.plain()))
        try:
            while following is not None:
                bucket, following = await asyncio.to_thread(self._writer.fill, incoming, following)
                await self._transfer.act("load", bucket=bucket.plain())
        finally:
            self._writer.release()
        incoming.refuse_missing()

    @override
    async def digests(self, manifest: WeightManifest) -> Mapping[str, str]:
        names = [entry.name for entry in manifest.tensors]
        return joined(await self._transfer.act("digest", tensors=names, version=manifest.version))

    @override
    def close(self) -> None:
        self._writer.close()
        self._transfer.close()
