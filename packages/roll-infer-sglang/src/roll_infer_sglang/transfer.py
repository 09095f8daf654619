"""Weights from the worker to the engine's processes, and back: what `loader` is asked, and what it answers."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import WeightSyncError
from roll_core.modeling.buckets import BucketWriter, Incoming
from roll_core.modeling.comparing import entries, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.types import WeightManifest
    from roll_infer_sglang.server import Server

LOADER = "roll_infer_sglang.loader.act"
"""What SGLang calls in its processes."""


class Transfer:
    """The engine has a process that holds weights on each of `devices`; nothing runs in them while this is used."""

    def __init__(self, who: str, server: Server, devices: Sequence[str], bucket_bytes: int) -> None:
        self._who, self._server, self._num_ranks = who, server, len(devices)
        self._writer = BucketWriter(bucket_bytes, devices)
        self._answers = Path(tempfile.mkdtemp(prefix="roll-sglang-answers-"))

    def close(self) -> None:
        """Give memory and files back. May be called several times."""
        self._writer.close()
        shutil.rmtree(self._answers, ignore_errors=True)

    async def compare(self, manifest: WeightManifest) -> None:
        """Refuse a manifest that is not this model's, before anything is touched."""
        answers = await self._act("compare", tensors=entries(manifest))
        refuse(self._who, "SGLang", manifest, answers)

    async def load(self, manifest: WeightManifest, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """All tensors, bucket by bucket."""
        incoming = Incoming(self._who, manifest, tensors)
        following = await asyncio.to_thread(next, incoming, None)
        trial = self._writer.trial(following[1]) if following is not None else None
        if trial is not None:
            self._writer.judge(await self._act("open", bucket=trial.plain()))
        try:
            while following is not None:
                bucket, following = await asyncio.to_thread(self._writer.fill, incoming, following)
                await self._act("load", bucket=bucket.plain())
        finally:
            self._writer.release()
        incoming.refuse_missing()

    async def digests(self, manifest: WeightManifest) -> Mapping[str, str]:
        """Of what the engine holds. Its tokens are of the manifest's version from here on."""
        names = [entry.name for entry in manifest.tensors]
        answers = await self._act("digest", tensors=names, version=str(manifest.version))
        return {name: digest for answer in answers for name, digest in answer.items()}

    async def _act(self, act: str, *, version: str | None = None, **message: Any) -> list[Any]:
        """What each of the engine's processes answers."""
        payload = _payload(json.dumps({"act": act, "answers": str(self._answers), **message}))
        body = {
            "serialized_named_tensors": [payload] * self._num_ranks,
            "load_format": LOADER,
            "flush_cache": False,
            "weight_version": version,
        }
        await self._server.ask("/update_weights_from_tensor", body)
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[Any]:
        found = []
        for rank in range(self._num_ranks):
            file = self._answers / str(rank)
            answer = json.loads(file.read_text(encoding="utf-8"))
            file.unlink()
            if "error" in answer:
                raise WeightSyncError(f"{self._who}: SGLang's process of rank {rank} failed: {answer['error']}")
            found.append(answer["done"])
        return found


def _payload(message: str) -> str:
    """An empty tensor of that name, as SGLang unpickles it."""
    import torch

    return base64.b64encode(pickle.dumps([(message, torch.empty(0))])).decode()
