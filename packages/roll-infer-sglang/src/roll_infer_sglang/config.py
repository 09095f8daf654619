"""`strategy_config` of `sglang`: the engine's own arguments under their own names, but for those that others decide."""

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
"""Beginning of the module of our entry point among SGLang's plugins."""
OURS = ("bucket_mib", "sleep_level")
"""What SGLang is not told."""
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
    """Each argument that SGLang has, so that an unknown one is refused with the nearest name; SGLang judges the
    values."""


class SglangConfig(_EngineKeys):
    """What is not given is left to SGLang, where nothing else is said."""

    tp_size: PositiveInt | None = None
    """Slots over which each layer is spread; as many as a worker has (`num_gpus_per_worker`) where not given."""
    mem_fraction_static: float = Field(default=0.8, gt=0, lt=1)
    """Share of the device's free memory for weights and cache. On a CPU: of the host's."""
    max_total_tokens: PositiveInt | None = None
    """Tokens whose keys and values the cache holds, where that is less than `mem_fraction_static` allows; on a CPU
    65,536 where not given."""
    context_length: PositiveInt | None = None
    """Longest sequence, prompt and response; the model's own limit where not given."""
    max_running_requests: PositiveInt | None = None
    """Sequences that are decoded together; further ones wait."""
    chunked_prefill_size: int | None = None
    """Tokens of prompts computed in one step, longer ones in pieces; -1 computes each at once."""
    page_size: PositiveInt | None = None
    """Tokens of a page of the cache."""
    disable_radix_cache: bool = False
    """Compute equal beginnings of prompts anew. The cache is dropped with every weight update."""
    attention_backend: str | None = None
    """Kernels of attention."""
    disable_cuda_graph: bool | None = None
    """Launch kernels one by one."""
    load_format: str = "auto"
    """How the model's files are read at the start; `dummy` draws random weights instead, which the first publish
    replaces."""
    schedule_policy: str = "fcfs"
    """Who is served first where not all can be, among requests of equal priority."""
    enable_priority_scheduling: bool = True
    """Heed the requests' priorities; none is interrupted for a more urgent one."""
    host: str = "127.0.0.1"
    """Address at which the server listens, OpenAI's routes (`/v1`) among others. Whoever reaches it can draw from the
    model; weights and other requests are out of reach without the worker's key."""
    enable_lora: bool = False
    """Serve the adapter that the role behind this one trains, as it is: a publish brings A and B alone, and the model
    beneath is that of the start. Where false, weights come merged."""
    sleep_level: Literal[0, 1, 2] = 1
    """What is given back while others use the slots: 1, keys and values, and weights to the host; 2, weights
    altogether, which the next publish brings anyway; 0, nothing. On a CPU keys and values go, and weights stay."""
    bucket_mib: PositiveInt = 64
    """Of published weights that are on their way into the engine's processes at a time; a larger tensor travels
    alone."""

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
        """`enable_lora`."""
        return self.enable_lora

    def check_model(self, keys: Mapping[str, Any]) -> None:
        """Raises `ValueError` for a mixture of experts, unless only its adapters are published."""
        if not self.enable_lora and has_experts(keys):
            raise ValueError(NO_PUBLISHED_EXPERTS)

    def check_architecture(self, keys: Mapping[str, Any]) -> None:
        """SGLang implements it, or can run the module of transformers."""
        check_engine(keys, _architectures(), "SGLang")

    def check_lengths(self, prompt: int, response: int) -> None:
        """`context_length`."""
        if self.context_length is not None and self.context_length < prompt + response:
            raise ValueError(
                f"context_length {self.context_length} is less than a prompt of {prompt} and a response of {response}"
                f" tokens = {prompt + response}"
            )

    def slots_per_worker(self) -> int | None:
        """As many as the model is spread over; as the role says where this is not given."""
        return self.tp_size

    def engine_arguments(self) -> dict[str, Any]:
        """What goes to SGLang as it is: what was given, and what has a value by default."""
        found = {name: getattr(self, name) for name in type(self).model_fields if name not in OURS}
        return {name: value for name, value in found.items() if value is not None or name in self.model_fields_set}


@lru_cache
def _architectures() -> frozenset[str]:
    """What SGLang's models name as their `EntryClass`, at the end of each file; empty if it is not known, or if another
    package adds to it."""
    folder = package_folder("sglang")
    others = [each for each in entry_points(group="sglang.srt.plugins") if not each.module.startswith(OUR_PLUGIN)]
    if folder is None or others or os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
        return frozenset()
    ends = (file.read_text(encoding="utf-8").partition("\nEntryClass")[2] for file in folder.glob("srt/models/*.py"))
    return frozenset(name for end in ends for name in re.findall(r"\w+", end))
