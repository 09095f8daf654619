"""`strategy_config` of `vllm`: vLLM's engine arguments by their own names, except those that ROLL sets itself."""

from __future__ import annotations

import ast
import re
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model, model_validator

from roll_core.spec.config import PositiveInt, StrategyConfig, WeightFormat
from roll_infer_vllm.arguments import DECIDED_ELSEWHERE, EIGHT_BITS, PASSED_ON
from roll_modeling.architectures import assigned, check_engine, has_experts, package_folder

NO_EXPERTS = (
    "quantization: fp8 takes no mixtures of experts: these need scales per block, and what the engine holds of its"
    " experts cannot be read back"
)
NO_PUBLISHED_EXPERTS = (
    "mixtures of experts are not supported: what vLLM holds of its experts cannot be read back, so the first publish"
    " would be refused"
)
KNOWN_PLUGINS = ("vllm.", "roll_infer_vllm.")
"""Module prefixes of vLLM plugins that register no architecture."""
LISTS = r"_(TEXT_GENERATION|MULTIMODAL|TRANSFORMERS_SUPPORTED|TRANSFORMERS_BACKEND)_MODELS"
"""Names of the lists in vLLM's registry with generative architectures."""
OURS = ("bucket_mib", "sleep_level", "endpoint_host")
"""Keys that belong to ROLL and are not passed to vLLM."""

if TYPE_CHECKING:
    from collections.abc import Mapping

    _EngineKeys = StrategyConfig
else:
    _EngineKeys = create_model(
        "_EngineKeys",
        __base__=StrategyConfig,
        **dict.fromkeys((*PASSED_ON, *DECIDED_ELSEWHERE), (Any, None)),
    )
    """All engine arguments of vLLM, so that unknown ones are rejected with the nearest name. vLLM validates values."""


class VllmConfig(_EngineKeys):
    """`strategy_config` of `vllm`. Keys that are not set keep vLLM's defaults unless stated otherwise."""

    tensor_parallel_size: PositiveInt = 1
    """Tensor parallel size: number of slots over which each layer is sharded."""
    pipeline_parallel_size: PositiveInt = 1
    """Pipeline parallel size: number of stages. A worker takes tensor × pipeline parallel slots."""
    max_model_len: PositiveInt | None = None
    """Maximum sequence length, prompt plus response, in tokens. Default: the model's own limit. The KV cache must hold
    one sequence of this length."""
    max_num_seqs: PositiveInt | None = None
    """Maximum number of sequences that are decoded in one batch; further sequences wait."""
    max_num_batched_tokens: PositiveInt | None = None
    """Maximum number of tokens computed in one step; longer prompts are prefilled in chunks."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Fraction of device memory for weights, activations and KV cache. On a CPU: fraction of host memory, if set."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Size of the KV cache in bytes, instead of `gpu_memory_utilization`. On a CPU 4 GiB if neither is set."""
    block_size: PositiveInt | None = None
    """Number of tokens per block of the KV cache."""
    enable_prefix_caching: bool = True
    """Share the prefill of common prompt prefixes. Each weight update clears the prefix cache."""
    enforce_eager: bool | None = None
    """Disable compilation and CUDA graphs. Default on a CPU: true, because compilation takes a minute there."""
    load_format: str = "auto"
    """How to load the model's files at the start. `dummy` initializes random weights, which the first weight update
    replaces."""
    scheduling_policy: Literal["fcfs", "priority"] = "priority"
    """Order in which waiting requests are scheduled: `priority` by request priority, then by arrival; `fcfs` by
    arrival."""
    bucket_mib: PositiveInt = 64
    """Size in MiB of the buckets in which a weight update is sent to the engine processes. A larger tensor gets its own
    bucket."""
    sleep_level: Literal[0, 1, 2] = 1
    """What the engine releases while other roles use the slots. 0: nothing. 1: the KV cache, and weights are offloaded
    to the host. 2: the KV cache and the weights, which the next weight update sends anyway. On a CPU the engine
    releases only the KV cache."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: the trainer sends linear layers' weights in fp8 (E4M3, one scale per row). The engine quantizes
    activations to fp8 per token. It starts without weights (`load_format: dummy`)."""
    enable_lora: bool = False
    """Serve the trained LoRA adapter on top of the initial base model; a weight update sends only A and B. If false, a
    weight update sends merged weights."""
    endpoint_host: str = "127.0.0.1"
    """Address at which the OpenAI-compatible endpoint listens, without authentication. Other hosts can connect if it is
    an external address of the worker's host."""

    @model_validator(mode="after")
    def _refuse_what_others_decide(self) -> VllmConfig:
        for name in sorted(self.model_fields_set & DECIDED_ELSEWHERE.keys()):
            raise ValueError(f"{name} {DECIDED_ELSEWHERE[name]}")
        if self.enable_lora:
            self._refuse_what_adapters_lack()
        if self.quantization and "load_format" in self.model_fields_set and self.load_format != "dummy":
            raise ValueError(
                f"quantization: fp8 starts without weights, which the first publish brings in 8 bits: load_format"
                f" {self.load_format} would read files for nothing; leave it out"
            )
        return self

    def _refuse_what_adapters_lack(self) -> None:
        problem = ""
        if self.load_format == "dummy":
            problem = "load_format: dummy would leave random weights beneath the adapter"
        elif self.sleep_level == 2:
            problem = "sleep_level 2 would lose the weights beneath the adapter, which no publish brings; 1 keeps them"
        elif self.quantization:
            problem = "quantization: fp8 takes the model beneath the adapter from publishes, which bring A and B alone"
        elif self.slots_per_worker() > 1:
            problem = "adapters over several slots are not supported: what the engine holds could not be read back"
        if problem:
            raise ValueError(f"enable_lora: {problem}")

    def serves_adapters(self) -> bool:
        """True if `enable_lora` is set."""
        return self.enable_lora

    def weight_format(self) -> WeightFormat:
        """Format in which the trainer sends weights: `fp8` if `quantization` is set, otherwise the model's dtype."""
        return self.quantization or "dtype"

    def check_model(self, keys: Mapping[str, Any]) -> None:
        """Raise `ValueError` for a mixture of experts, unless `enable_lora` is set."""
        if not self.enable_lora and has_experts(keys):
            raise ValueError(NO_EXPERTS if self.quantization else NO_PUBLISHED_EXPERTS)

    def check_architecture(self, keys: Mapping[str, Any]) -> None:
        """Raise `ValueError` unless vLLM implements the architecture or can run its transformers module."""
        check_engine(keys, _architectures(), "vLLM")

    def check_lengths(self, prompt: int, response: int) -> None:
        """Raise `ValueError` if prompt plus response exceeds `max_model_len`."""
        if self.max_model_len is not None and self.max_model_len < prompt + response:
            raise ValueError(
                f"max_model_len {self.max_model_len} is less than a prompt of {prompt} and a response of {response}"
                f" tokens = {prompt + response}"
            )

    def slots_per_worker(self) -> int:
        """Number of slots per worker: tensor × pipeline parallel size."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def engine_arguments(self) -> dict[str, Any]:
        """Engine arguments passed to vLLM: keys that are set or have a default other than None."""
        found = {name: getattr(self, name) for name in type(self).model_fields if name not in OURS}
        if self.quantization:
            found |= {"quantization": EIGHT_BITS, "load_format": "dummy"}
        return {name: value for name, value in found.items() if value is not None or name in self.model_fields_set}


def _architectures() -> frozenset[str]:
    """Architectures in vLLM's registry; empty if vLLM is not installed or if other vLLM plugins may register more."""
    folder = package_folder("vllm")
    others = [each for each in entry_points(group="vllm.general_plugins") if not each.module.startswith(KNOWN_PLUGINS)]
    if folder is None or others:
        return frozenset()
    values = assigned(folder / "model_executor" / "models" / "registry.py")
    lists = [value for name, value in values if re.fullmatch(LISTS, name) and isinstance(value, ast.Dict)]
    return frozenset(str(key.value) for each in lists for key in each.keys if isinstance(key, ast.Constant))
