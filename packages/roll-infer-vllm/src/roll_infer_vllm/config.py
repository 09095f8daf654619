"""`strategy_config` of `vllm`: the engine's own arguments under their own names, but for those that others decide."""

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
"""Modules of vLLM's plugins that register no architecture."""
LISTS = r"_(TEXT_GENERATION|MULTIMODAL|TRANSFORMERS_SUPPORTED|TRANSFORMERS_BACKEND)_MODELS"
"""Names in vLLM's registry; the architectures of the other lists do not generate."""
OURS = ("bucket_mib", "sleep_level", "endpoint_host")
"""What vLLM is not told."""

if TYPE_CHECKING:
    from collections.abc import Mapping

    _EngineKeys = StrategyConfig
else:
    _EngineKeys = create_model(
        "_EngineKeys",
        __base__=StrategyConfig,
        **dict.fromkeys((*PASSED_ON, *DECIDED_ELSEWHERE), (Any, None)),
    )
    """Each argument that vLLM has, so that an unknown one is refused with the nearest name; vLLM judges the values."""


class VllmConfig(_EngineKeys):
    """What is not given is left to vLLM, where nothing else is said."""

    tensor_parallel_size: PositiveInt = 1
    """Slots over which each layer is spread."""
    pipeline_parallel_size: PositiveInt = 1
    """Slots over which the layers are spread. A worker takes tensor × pipeline parallel slots."""
    max_model_len: PositiveInt | None = None
    """Longest sequence, prompt and response; the model's own limit where not given. Its keys and values have to fit
    into the cache."""
    max_num_seqs: PositiveInt | None = None
    """Sequences that are decoded together; further ones wait."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens computed in one step; longer prompts are computed in pieces."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of the device's memory for weights, activations and cache. On a CPU: of the host's, if it is given."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Memory of the cache, instead of `gpu_memory_utilization`; on a CPU 4 GiB where neither is given."""
    block_size: PositiveInt | None = None
    """Tokens of a block of the cache."""
    enable_prefix_caching: bool = True
    """Compute equal beginnings of prompts once. The cache is dropped with every weight update."""
    enforce_eager: bool | None = None
    """No compilation and no CUDA graphs; where not given, true on a CPU, where compiling takes a minute."""
    load_format: str = "auto"
    """How the model's files are read at the start; `dummy` draws random weights instead, which the first publish
    replaces."""
    scheduling_policy: Literal["fcfs", "priority"] = "priority"
    """Who is served first where not all can be: `priority` heeds the requests', and then the order of arrival."""
    bucket_mib: PositiveInt = 64
    """Of published weights that are on their way into the engine's processes at a time; a larger tensor travels
    alone."""
    sleep_level: Literal[0, 1, 2] = 1
    """What is given back while others use the slots: 1, keys and values, and weights to the host; 2, weights
    altogether, which the next publish brings anyway; 0, nothing. On a CPU keys and values go, and weights stay."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: the trainer sends the matrices of layers in 8 bits (E4M3, a scale per row), and the engine multiplies them
    with activations that it rounds to 8 bits token by token. It starts without weights (`load_format: dummy`)."""
    enable_lora: bool = False
    """Serve the adapter that the role behind this one trains, as it is: a publish brings A and B alone, and the model
    beneath is that of the start. Where false, weights come merged."""
    endpoint_host: str = "127.0.0.1"
    """Address at which the OpenAI-compatible endpoint listens; it asks nobody who they are. An address of the worker's
    host lets other hosts in."""

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
        """`enable_lora`."""
        return self.enable_lora

    def weight_format(self) -> WeightFormat:
        """`quantization`."""
        return self.quantization or "dtype"

    def check_model(self, keys: Mapping[str, Any]) -> None:
        """Raises `ValueError` for a mixture of experts, unless only its adapters are published."""
        if not self.enable_lora and has_experts(keys):
            raise ValueError(NO_EXPERTS if self.quantization else NO_PUBLISHED_EXPERTS)

    def check_architecture(self, keys: Mapping[str, Any]) -> None:
        """vLLM implements it, or can run the module of transformers."""
        check_engine(keys, _architectures(), "vLLM")

    def check_lengths(self, prompt: int, response: int) -> None:
        """`max_model_len`."""
        if self.max_model_len is not None and self.max_model_len < prompt + response:
            raise ValueError(
                f"max_model_len {self.max_model_len} is less than a prompt of {prompt} and a response of {response}"
                f" tokens = {prompt + response}"
            )

    def slots_per_worker(self) -> int:
        """Tensor × pipeline parallel."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def engine_arguments(self) -> dict[str, Any]:
        """What goes to vLLM as it is: what was given, and what has a value by default."""
        found = {name: getattr(self, name) for name in type(self).model_fields if name not in OURS}
        if self.quantization:
            found |= {"quantization": EIGHT_BITS, "load_format": "dummy"}
        return {name: value for name, value in found.items() if value is not None or name in self.model_fields_set}


def _architectures() -> frozenset[str]:
    """Of vLLM's registry; empty if it is not known, or if plugins of vLLM may add to it."""
    folder = package_folder("vllm")
    others = [each for each in entry_points(group="vllm.general_plugins") if not each.module.startswith(KNOWN_PLUGINS)]
    if folder is None or others:
        return frozenset()
    values = assigned(folder / "model_executor" / "models" / "registry.py")
    lists = [value for name, value in values if re.fullmatch(LISTS, name) and isinstance(value, ast.Dict)]
    return frozenset(str(key.value) for each in lists for key in each.keys if isinstance(key, ast.Constant))
