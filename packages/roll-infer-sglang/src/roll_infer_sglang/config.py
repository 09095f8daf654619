"""`strategy_config` of `sglang`: SGLang's engine arguments by their own names, except those that ROLL sets itself."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model, model_validator

from roll_core.spec.config import PositiveInt, StrategyConfig
from roll_infer_sglang.arguments import DECIDED_ELSEWHERE, PASSED_ON
from roll_modeling.architectures import check_engine, has_experts, package_folder

OUR_PLUGIN = "roll_infer_sglang."
"""Module prefix of our entry point among SGLang's plugins."""
OURS = ("bucket_mib", "sleep_level")
"""Keys that belong to ROLL and are not passed to SGLang."""
NO_PUBLISHED_EXPERTS = (
    "mixtures of experts are not supported: what SGLang holds of its experts cannot be read back, so the first publish"
    " would be refused"
)
ONE_SLOT = "adapters over several slots are not supported: what the engine holds could not be read back"

if TYPE_CHECKING:
    from collections.abc import Mapping

    _EngineKeys = StrategyConfig
else:
    _EngineKeys = create_model(
        "_EngineKeys",
        __base__=StrategyConfig,
        **dict.fromkeys((*PASSED_ON, *DECIDED_ELSEWHERE), (Any, None)),
    )
    """All engine arguments of SGLang, so that unknown ones are rejected with the nearest name. SGLang validates values.
    """


class SglangConfig(_EngineKeys):
    """`strategy_config` of `sglang`. Keys that are not set keep SGLang's defaults unless stated otherwise."""

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
    load_format: str = "auto"
    """How to load the model's files at the start. `dummy` initializes random weights, which the first weight update
    replaces."""
    schedule_policy: str = "fcfs"
    """Order in which waiting requests of equal priority are scheduled."""
    enable_priority_scheduling: bool = True
    """Schedule waiting requests by priority. Running requests are not preempted by requests of higher priority."""
    host: str = "127.0.0.1"
    """Address at which the server listens, including the OpenAI-compatible routes (`/v1`). All clients that can connect
    can generate. Updating weights and aborting requests of others need the worker's key."""
    enable_lora: bool = False
    """Serve the trained LoRA adapter on top of the initial base model; a weight update sends only A and B. If false, a
    weight update sends merged weights."""
    sleep_level: Literal[0, 1, 2] = 1
    """What the engine releases while other roles use the slots. 0: nothing. 1: the KV cache, and weights are offloaded
    to the host. 2: the KV cache and the weights, which the next weight update sends anyway. On a CPU the engine
    releases only the KV cache."""
    bucket_mib: PositiveInt = 64
    """Size in MiB of the buckets in which a weight update is sent to the engine processes. A larger tensor gets its own
    bucket."""

    @model_validator(mode="after")
    def _refuse_what_others_decide(self) -> SglangConfig:
        for name in sorted(self.model_fields_set & DECIDED_ELSEWHERE.keys()):
            raise ValueError(f"{name} {DECIDED_ELSEWHERE[name]}")
        if self.enable_lora:
            self._refuse_what_adapters_lack()
        return self

    def _refuse_what_adapters_lack(self) -> None:
        problem = ""
        if self.load_format == "dummy":
            problem = "load_format: dummy would leave random weights beneath the adapter"
        elif self.sleep_level == 2:
            problem = "sleep_level 2 would lose the weights beneath the adapter, which no publish brings; 1 keeps them"
        elif (self.tp_size or 1) > 1:
            problem = ONE_SLOT
        if problem:
            raise ValueError(f"enable_lora: {problem}")

    def serves_adapters(self) -> bool:
        """True if `enable_lora` is set."""
        return self.enable_lora

    def check_model(self, keys: Mapping[str, Any]) -> None:
        """Raise `ValueError` for a mixture of experts, unless `enable_lora` is set."""
        if not self.enable_lora and has_experts(keys):
            raise ValueError(NO_PUBLISHED_EXPERTS)

    def check_architecture(self, keys: Mapping[str, Any]) -> None:
        """Raise `ValueError` unless SGLang implements the architecture or can run its transformers module."""
        check_engine(keys, _architectures(), "SGLang")

    def check_lengths(self, prompt: int, response: int) -> None:
        """Raise `ValueError` if prompt plus response exceeds `context_length`."""
        if self.context_length is not None and self.context_length < prompt + response:
            raise ValueError(
                f"context_length {self.context_length} is less than a prompt of {prompt} and a response of {response}"
                f" tokens = {prompt + response}"
            )

    def slots_per_worker(self) -> int | None:
        """Number of slots per worker: `tp_size`; None if it is not set and the role decides."""
        return self.tp_size

    def engine_arguments(self) -> dict[str, Any]:
        """Engine arguments passed to SGLang: keys that are set or have a default other than None."""
        found = {name: getattr(self, name) for name in type(self).model_fields if name not in OURS}
        return {name: value for name, value in found.items() if value is not None or name in self.model_fields_set}


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
