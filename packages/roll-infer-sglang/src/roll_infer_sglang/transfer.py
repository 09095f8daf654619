"""Weight-update messages from the worker to `loader` in the engine processes, and their results."""

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
"""Function that SGLang calls in its processes."""


class Transfer:
    """Message channel to the engine's `num_ranks` processes that hold weights; requires that no request is running."""

    def __init__(self, who: str, server: Server, num_ranks: int) -> None:
        self._who, self._server, self._num_ranks = who, server, num_ranks
        self._answers = Path(tempfile.mkdtemp(prefix="roll-sglang-answers-"))

    def close(self) -> None:
        """Delete the temporary files. Idempotent."""
        shutil.rmtree(self._answers, ignore_errors=True)

    async def act(self, act: str, *, version: int | None = None, **message: Any) -> list[Any]:
        """Run the action `act` of `loader` in each engine process. Returns the results by rank.

        With `version`, SGLang labels all further tokens with this weight version. Raises `WeightSyncError` if a process
        failed, and `ServerError`.
        """
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
    """Loads what a weight update sends: a whole model, or a LoRA adapter. No request may be running during a call."""

    adapter: str | None = None
    """Name of the adapter that requests must use, after the first update; None if they use the model itself."""

    @abstractmethod
    async def compare(self, manifest: WeightManifest) -> None:
        """Raise `WeightSyncError` if the manifest does not match the engine. Changes nothing."""

    @abstractmethod
    async def load(self, incoming: Incoming) -> None:
        """Load all tensors. Raises `WeightSyncError`; the engine can take the next update also after an error."""

    @abstractmethod
    async def digests(self, manifest: WeightManifest) -> Mapping[str, str]:
        """Digests of the loaded tensors by name. SGLang labels all further tokens with the manifest's version."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of loading. Idempotent."""


def joined(answers: Iterable[Mapping[str, str]]) -> Mapping[str, str]:
    """Digests of all processes in one mapping."""
    return {name: digest for answer in answers for name, digest in answer.items()}


def _payload(message: str) -> str:
    """Serialized empty tensor whose name is the message, in the format that SGLang unpickles."""
    import torch

    return base64.b64encode(pickle.dumps([(message, torch.empty(0))])).decode()
