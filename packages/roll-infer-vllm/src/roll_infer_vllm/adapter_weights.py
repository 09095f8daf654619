"""Weight updates of LoRA adapters: written in PEFT's format and reloaded in place.

    publish:  A, B of each layer --> a folder in memory --> AsyncLLM.add_lora(load_inplace) --> read back, digested

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
from roll_infer_vllm.updates import Loader
from roll_modeling.adapter_updates import collected, refuse_adapter, write_adapter
from roll_modeling.comparing import entries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.engine.async_llm import AsyncLLM

    from roll_core.spec.model import LoraSpec
    from roll_core.types import WeightManifest
    from roll_modeling.buckets import Incoming

NUMBER = 1
"""vLLM's integer id of the single adapter."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM accepts; an adapter of another rank uses the next larger one."""
MEMORY = Path("/dev/shm")


def engine_arguments(lora: LoraSpec) -> Mapping[str, Any]:
    """Engine arguments for serving this single adapter. Raises `WeightSyncError` if its rank exceeds vLLM's maximum."""
    room = next((rank for rank in RANKS if rank >= lora.rank), None)
    if room is None:
        raise WeightSyncError(f"lora_rank is {lora.rank}; vLLM serves adapters of at most {RANKS[-1]}")
    return {"max_lora_rank": room, "max_loras": 1, "max_cpu_loras": 1}


class AdapterWeights(Loader):
    """Loader that replaces the single LoRA adapter."""

    def __init__(self, engine: AsyncLLM, who: str, name: str, lora: LoraSpec) -> None:
        """`name` is the adapter's name in requests."""
        self._engine, self._who, self._name, self._rank = engine, who, name, lora.rank
        memory = MEMORY if MEMORY.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="roll-vllm-adapter-", dir=memory))
        self.request: Any = None
        """`LoRARequest` of the loaded adapter; None before the first update, when an adapter would change nothing."""

    @override
    async def compare(self, manifest: WeightManifest) -> None:
        answers = await self._engine.collective_rpc("roll_compare_adapter", args=(entries(manifest),))
        refuse_adapter(self._who, "vLLM", manifest, self._rank, answers)

    @override
    async def load(self, incoming: Incoming) -> None:
        from vllm.lora.request import LoRARequest

        await asyncio.to_thread(self._write, incoming)
        fields = {"lora_name": self._name, "lora_int_id": NUMBER, "lora_path": str(self._folder)}
        try:
            await self._engine.add_lora(LoRARequest(**fields, load_inplace=True))
        except Exception as error:  # vLLM raises no specific type for errors in its processes
            raise WeightSyncError(f"{self._who}: vLLM does not take the adapter: {error}") from error
        self.request = LoRARequest(**fields)

    @override
    async def digests(self, manifest: WeightManifest) -> list[Mapping[str, str]]:
        found: list[Mapping[str, str]] = await self._engine.collective_rpc(
            "roll_adapter_digests", args=(entries(manifest),)
        )
        return found

    @override
    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, incoming: Incoming) -> None:
        write_adapter(self._folder, collected(incoming), self._rank)
