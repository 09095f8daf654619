"""`strategy_config` of `sglang`: SGLang's engine arguments by their own names, except those that ROLL sets itself."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model

from roll_core.spec.config import PositiveInt  # noqa: TC001 - pydantic reads the annotations
from roll_infer_sglang.arguments import PASSED_ON, REJECTED
from roll_modeling.architectures import check_engine, has_experts, package_folder
from roll_modeling.engine_config import EngineConfig

OUR_PLUGIN = "roll_infer_sglang."
"""Module prefix of our entry point among SGLang's plugins."""

if TYPE_CHECKING:
    from collections.abc import Mapping

    _EngineKeys = EngineConfig
else:
    _EngineKeys = create_model(
        "_EngineKeys", __base__=EngineConfig, **dict.fromkeys((*PASSED_ON, *REJECTED), (Any, None))
    )
    """All engine arguments of SGLang, so that unknown ones are rejected with the nearest name. SGLang validates values.
    """


class SglangConfig(_EngineKeys):
    """`strategy_config` of `sglang`. Keys that are not set keep SGLang's defaults unless stated otherwise."""

    engine = "SGLang"
    rejected = REJECTED
    length_key = "context_length"

    tp_size: PositiveInt | None = None
    """Tensor parallel size: number of slots over which each layer is sharded. Default: the worker's slots
    (`num_gpus_per_worker`)."""
    mem_fraction_static: float = Field(default=0.8, gt=0, lt=1)
    """Fraction of the device's free memory for weights and KV cache. On a CPU: of host memory."""
    max_total_tokens: PositiveInt | None = None
    """Maximum number of tokens in the KV cache; `mem_fraction_static` may limit it further. Default on a CPU: 65,536.
    """
    context_length: PositiveInt | None = None
    """Maximum sequence length, prompt plus response, in tokens. Default: the model's own limit."""
    max_running_requests: PositiveInt | None = None
    """Maximum number of sequences that are decoded in one batch; further sequences wait."""
    chunked_prefill_size: int | None = None
    """Maximum number of prompt tokens prefilled in one step; longer prompts are prefilled in chunks. -1 disables
    chunking."""
    page_size: PositiveInt | None = None
    """Number of tokens per page of the KV cache."""
    disable_radix_cache: bool = False
    """Disable the radix cache, which shares the prefill of common prompt prefixes. Each weight update clears it."""
    attention_backend: str | None = None
    """Attention kernels."""
    disable_cuda_graph: bool | None = None
    """Disable CUDA graphs."""
    schedule_policy: str = "fcfs"
    """Order in which waiting requests of equal priority are scheduled."""
    enable_priority_scheduling: bool = True
    """Schedule waiting requests by priority. Running requests are not preempted by requests of higher priority."""
    host: str = "127.0.0.1"
    """Address at which the server listens, including the OpenAI-compatible routes (`/v1`). All clients that can connect
    can generate. Updating weights and aborting requests of others need the worker's key."""

    def check_model(self, keys: Mapping[str, Any]) -> None:
        """Raise `ValueError` for a mixture of experts, unless `enable_lora` is set."""
        if not self.enable_lora and has_experts(keys):
            raise ValueError(
                "mixtures of experts are not supported: the experts loaded in SGLang cannot be read back, so the first"
                " weight update would be rejected"
            )

    def check_architecture(self, keys: Mapping[str, Any]) -> str | None:
        """Raise `ValueError` unless SGLang implements the architecture or can run its transformers module."""
        return check_engine(keys, _architectures(), self.engine)

    def slots_per_worker(self) -> int | None:
        """Number of slots per worker: `tp_size`; None if it is not set and the role decides."""
        return self.tp_size


@lru_cache
def _architectures() -> frozenset[str]:
    """Architectures of SGLang, read from `EntryClass` at the end of each model file.

    Empty if SGLang is not installed or if another package may add architectures.
    """
    folder = package_folder("sglang")
    others = [each for each in entry_points(group="sglang.srt.plugins") if not each.module.startswith(OUR_PLUGIN)]
    if folder is None or others or os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
        return frozenset()
    ends = (file.read_text(encoding="utf-8").partition("\nEntryClass")[2] for file in folder.glob("srt/models/*.py"))
    return frozenset(name for end in ends for name in re.findall(r"\w+", end))
