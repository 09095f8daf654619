"""What the worker asks of the engine's processes about weights: messages to `loader`, and what it answers."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import shutil
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from roll_core.types import WeightManifest
    from roll_infer_sglang.server import Server
    from roll_modeling.buckets import Incoming

LOADER = "roll_infer_sglang.loader.act"
"""What SGLang calls in its processes."""


class Transfer:
    """The engine has `num_ranks` processes that hold weights; nothing runs in them while this is used."""

    def __init__(self, who: str, server: Server, num_ranks: int) -> None:
        self._who, self._server, self._num_ranks = who, server, num_ranks
        self._answers = Path(tempfile.mkdtemp(prefix="roll-sglang-answers-"))

    def close(self) -> None:
        """Give files back. May be called several times."""
        shutil.rmtree(self._answers, ignore_errors=True)

    async def act(self, act: str, *, version: int | None = None, **message: Any) -> list[Any]:
        """What each of the engine's processes answers. Tokens are of `version` from here on, if one is given."""
        payload = _payload(json.dumps({"act": act, "answers": str(self._answers), **message}))
        body = {
            "serialized_named_tensors": [payload] * self._num_ranks,
            "load_format": LOADER,
            "flush_cache": False,
            "weight_version": None if version is None else str(version),
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


class Published(ABC):
    """What is published: a whole model, or an adapter. Nothing runs while this is used."""

    adapter: str | None = None
    """What requests have to name, once something is published; None where they are answered by the model itself."""

    @abstractmethod
    async def compare(self, manifest: WeightManifest) -> None:
        """Refuse a manifest that is not this engine's, before anything is touched. Raises `WeightSyncError`."""

    @abstractmethod
    async def load(self, incoming: Incoming) -> None:
        """All tensors. Also after an error the engine is left ready for the next update. Raises `WeightSyncError`."""

    @abstractmethod
    async def digests(self, manifest: WeightManifest) -> Mapping[str, str]:
        """Of what the engine holds. Its tokens are of the manifest's version from here on."""

    @abstractmethod
    def close(self) -> None:
        """Give back what loading took. May be called several times."""


def joined(answers: Iterable[Mapping[str, str]]) -> Mapping[str, str]:
    """Of all processes."""
    return {name: digest for answer in answers for name, digest in answer.items()}


def _payload(message: str) -> str:
    """An empty tensor of that name, as SGLang unpickles it."""
    import torch

    return base64.b64encode(pickle.dumps([(message, torch.empty(0))])).decode()
