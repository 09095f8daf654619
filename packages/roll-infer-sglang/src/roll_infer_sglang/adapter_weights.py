"""Weight updates of LoRA adapters: written in PEFT's format; the new adapter replaces the previous one.

    publish:  A, B of each layer --> a folder in memory --> /unload_…, /load_lora_adapter --> read back, digested

The base model keeps its initial weights. Every request names the adapter, so all responses use it.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import WeightSyncError
from roll_infer_sglang.server import ServerDiedError, ServerError
from roll_infer_sglang.transfer import Published, joined
from roll_modeling.adapter_updates import collected, refuse_adapter, write_adapter
from roll_modeling.comparing import entries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.model import LoraSpec
    from roll_core.types import WeightManifest
    from roll_infer_sglang.server import Server
    from roll_infer_sglang.transfer import Transfer
    from roll_modeling.buckets import Incoming

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that adapters may target: SGLang supports them and their buffers can be read back."""
MEMORY = Path("/dev/shm")


def adapter_arguments(lora: LoraSpec, device: str) -> Mapping[str, Any]:
    """Server arguments for serving this adapter and the base model. `enable_lora` comes from the user's config."""
    return {
        "max_lora_rank": lora.rank,
        "lora_target_modules": list(LAYERS),
        "max_loras_per_batch": 2,
        **({"lora_backend": "torch_native"} if device == "cpu" else {}),
    }


class AdapterWeights(Published):
    """Loader that replaces the single LoRA adapter."""

    def __init__(self, transfer: Transfer, server: Server, who: str, name: str, lora: LoraSpec) -> None:
        """`name` is the adapter's name in requests."""
        self._transfer, self._server, self._who, self._name = transfer, server, who, name
        self._rank = lora.rank
        memory = MEMORY if MEMORY.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="roll-sglang-adapter-", dir=memory))
        self._is_loaded = False
        self._partners: dict[str, list[int]] = {}
        """Shapes, by name, of tensors that SGLang needs in addition to those of the manifest."""

    @override
    async def compare(self, manifest: WeightManifest) -> None:
        answers = await self._transfer.act("compare adapter", tensors=entries(manifest))
        refuse_adapter(self._who, "SGLang", manifest, self._rank, answers)
        self._partners = dict(answers[0]["partners"])

    @override
    async def load(self, incoming: Incoming) -> None:
        await asyncio.to_thread(self._write, incoming)
        try:
            if self._is_loaded:
                await self._server.ask("/unload_lora_adapter", {"lora_name": self._name})
                self._is_loaded = False
            await self._server.ask("/load_lora_adapter", {"lora_name": self._name, "lora_path": str(self._folder)})
        except ServerDiedError:
            raise
        except ServerError as error:
            raise WeightSyncError(f"{self._who}: SGLang does not take the adapter: {error}") from error
        self._is_loaded = True
        self.adapter = self._name

    @override
    async def digests(self, manifest: WeightManifest) -> Mapping[str, str]:
        sent = entries(manifest)
        return joined(await self._transfer.act("digest adapter", tensors=sent, version=manifest.version))

    @override
    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._transfer.close()

    def _write(self, incoming: Incoming) -> None:
        """Write the adapter; adds zero tensors for parts of fused modules that have no adapter."""
        tensors = collected(incoming)
        some = next(iter(tensors.values()))
        tensors |= {name: some.new_zeros(shape) for name, shape in self._partners.items()}
        write_adapter(self._folder, tensors, self._rank)
