"""Calls from the worker to SGLang's engine processes during a weight update, and their receiver `act`.

SGLang calls `act` (its argument `custom_weight_loader`) with the model and a list of named tensors. The list has one
empty tensor, whose name is a JSON message of the worker. The result is written to a file, for two reasons: SGLang's own
response contains no result, and an exception raised in `act` would end the engine.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import WeightSyncError
from roll_infer_sglang.release import has_update_sessions
from roll_infer_sglang.server import ServerDiedError, ServerError
from roll_modeling.engine_weights import EngineProcesses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from roll_core.spec.model import LoraSpec
    from roll_infer_sglang.server import SglangServer
    from roll_modeling.engine_weights import Action

LOADER = "roll_infer_sglang.processes.act"
"""Function that SGLang calls in its processes."""
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that adapters may target: SGLang supports them and their buffers can be read back."""


class SglangProcesses(EngineProcesses):
    """The `num_ranks` engine processes of one server that have the model. No request may be running during a call."""

    engine = "SGLang"

    def __init__(self, server: SglangServer, who: str, num_ranks: int) -> None:
        self._server, self.who, self._num_ranks = server, who, num_ranks
        self._results = Path(tempfile.mkdtemp(prefix="roll-sglang-results-"))
        self.adapter: str | None = None
        """Name of the adapter that requests must use, after the first update; None if they use the model itself."""
        self._adapter_loaded = False
        self._has_sessions, self._in_session = has_update_sessions(), False

    @override
    async def begin_update(self) -> None:
        """Open a session of SGLang for all buckets. Other calls of `act` have a session each.

        At the end of a session, SGLang converts loaded weights to the form that its kernels need.
        """
        if self._has_sessions:
            await self._server.request("/begin_weight_update", {})
            self._in_session = True

    @override
    async def finish_update(self) -> None:
        if self._in_session:
            self._in_session = False
            await self._server.request("/end_weight_update", {})

    @override
    async def act(self, action: Action, argument: Any, *, version: int | None = None) -> list[Any]:
        if self._in_session or not self._has_sessions:
            return await self._act(action, argument, version)
        await self.begin_update()
        try:
            return await self._act(action, argument, version)
        finally:
            await self.finish_update()

    async def _act(self, action: Action, argument: Any, version: int | None) -> list[Any]:
        import torch

        message = json.dumps({"action": action, "argument": argument, "results": str(self._results)})
        tensors = base64.b64encode(pickle.dumps([(message, torch.empty(0))])).decode()
        body = {
            "serialized_named_tensors": [tensors] * self._num_ranks,
            "load_format": LOADER,
            "flush_cache": False,
            "weight_version": None if version is None else str(version),
        }
        await self._server.request("/update_weights_from_tensor", body)
        return await asyncio.to_thread(self._read)

    @override
    async def load_adapter(self, name: str, folder: Path) -> None:
        try:
            if self._adapter_loaded:
                await self._server.request("/unload_lora_adapter", {"lora_name": name})
                self._adapter_loaded = False
            await self._server.request("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except ServerDiedError:
            raise
        except ServerError as error:
            raise WeightSyncError(f"{self.who}: SGLang rejected the adapter: {error}") from error
        self._adapter_loaded = True
        self.adapter = name

    @override
    def close(self) -> None:
        shutil.rmtree(self._results, ignore_errors=True)

    def _read(self) -> list[Any]:
        results = []
        for rank in range(self._num_ranks):
            file = self._results / str(rank)
            result = json.loads(file.read_text(encoding="utf-8"))
            file.unlink()
            if "error" in result:
                raise WeightSyncError(f"{self.who}: SGLang's process of rank {rank} failed: {result['error']}")
            results.append(result["done"])
        return results


def act(model: nn.Module, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Run the action of the message on this process's model; write its result, or the error, to this rank's file."""
    import torch

    from roll_infer_sglang.loaded_model import SglangModel

    message = json.loads(named_tensors[0][0])
    loaded = SglangModel(model)
    try:
        with torch.no_grad():
            result = {"done": loaded.act(message["action"], message["argument"])}
    except Exception as error:  # the worker raises it
        result = {"error": f"{type(error).__name__}: {error}"}
    file = Path(message["results"], str(loaded.rank))
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(file)


def adapter_arguments(lora: LoraSpec, device: str) -> Mapping[str, Any]:
    """Server arguments for serving this adapter and the base model. `enable_lora` comes from the user's config."""
    return {
        "max_lora_rank": lora.max_rank,
        "lora_target_modules": list(LAYERS),
        "max_loras_per_batch": 2,
        **({"lora_backend": "torch_native"} if device == "cpu" else {}),
    }
