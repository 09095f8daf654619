"""`strategy_config` of `vllm`: vLLM's engine arguments by their own names, except those that ROLL sets itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model, model_validator

from roll_core.spec.config import PositiveInt, WeightFormat
from roll_core.spec.fp8 import BLOCK
from roll_infer_vllm.arguments import PASSED_ON, QUANTIZATION, REJECTED
from roll_modeling.engine_config import EngineConfig
from roll_modeling.model_table import has_experts, num_experts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.types import MediaKind

    _EngineKeys = EngineConfig
else:
    _EngineKeys = create_model(
        "_EngineKeys", __base__=EngineConfig, **dict.fromkeys((*PASSED_ON, *REJECTED), (Any, None))
    )
    """All engine arguments of vLLM, so that unknown ones are rejected with the nearest name. vLLM validates values."""

LLAVAS = ("llava", "llava_next", "llava_next_video")
CUT_ENCODERS = ("clip_vision_model", "siglip_vision_model")
"""Image encoders of which vLLM loads only a part in models of `LLAVAS`. The first is transformers' default."""
DEFAULT_BATCHED_TOKENS = 2048
"""vLLM's default of `max_num_batched_tokens`: `SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS`."""
MORE_REPLICAS = "and give device_mapping more slots: each worker is a replica"


class VllmConfig(_EngineKeys):
    """`strategy_config` of `vllm`. Keys that are not set keep vLLM's defaults unless stated otherwise."""

    engine = "vLLM"
    own_keys = (*EngineConfig.own_keys, "endpoint_host")
    rejected = REJECTED
    length_key = "max_model_len"

    tensor_parallel_size: PositiveInt = 1
    """Tensor parallel size: number of slots over which each layer is sharded."""
    pipeline_parallel_size: PositiveInt = 1
    """Pipeline parallel size: number of stages. A worker takes tensor × pipeline × data parallel slots."""
    data_parallel_size: PositiveInt = 1
    """Data parallel size of attention in a mixture of experts: number of ranks, of `tensor_parallel_size` slots each,
    that generate different sequences and share the experts. Needs `enable_expert_parallel`. To serve a dense model on
    more slots, use more replicas: give `device_mapping` more slots."""
    enable_expert_parallel: bool = False
    """Give each slot some of the experts whole, instead of a part of every expert. The number of experts must be
    divisible by `tensor_parallel_size` × `data_parallel_size`."""
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
    scheduling_policy: Literal["fcfs", "priority"] = "priority"
    """Order in which waiting requests are scheduled: `priority` by request priority, then by arrival; `fcfs` by
    arrival."""
    quantization: Literal["fp8", "fp8_per_block"] | None = None
    """`fp8`: the trainer sends linear layers' weights in fp8 (E4M3, one scale per row). `fp8_per_block`: also experts'
    weights, with one scale per 128 × 128 block. The engine quantizes activations to fp8 per token, or per token and 128
    columns. It starts without weights (`load_format: dummy`)."""
    endpoint_host: str = "127.0.0.1"
    """Address at which the OpenAI-compatible endpoint listens, without authentication. Other hosts can connect if it is
    an external address of the worker's host."""

    @model_validator(mode="after")
    def _check_quantization(self) -> VllmConfig:
        if self.quantization and "load_format" in self.model_fields_set and self.load_format != "dummy":
            raise ValueError(
                f"load_format is {self.load_format}; with quantization: {self.quantization} the engine starts without"
                " weights: remove load_format"
            )
        return self

    @model_validator(mode="after")
    def _check_data_parallel(self) -> VllmConfig:
        if self.data_parallel_size == 1:
            return self
        if not self.enable_expert_parallel:
            raise ValueError(
                f"data_parallel_size is {self.data_parallel_size}, but enable_expert_parallel is not set: set it for a"
                f" mixture of experts; otherwise remove data_parallel_size, {MORE_REPLICAS}"
            )
        if self.pipeline_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size is {self.data_parallel_size} and pipeline_parallel_size"
                f" {self.pipeline_parallel_size}: not supported together; use tensor_parallel_size"
            )
        return self

    def adapter_problem(self) -> str:
        """Reason why the other keys do not permit an adapter; empty if they do."""
        if self.quantization:
            return (
                f"quantization: {self.quantization} starts without weights, and with an adapter no weight update sends"
                " the base model"
            )
        return super().adapter_problem()

    def check_router_replay(self, keys: Mapping[str, Any]) -> None:
        """Raise `ValueError` if the other keys do not permit vLLM to return routed experts."""
        if not self.enable_prefix_caching:
            raise ValueError(
                "needs enable_prefix_caching: vLLM stores routed experts by the blocks of its prefix cache"
            )
        if self.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size is {self.pipeline_parallel_size}: vLLM returns routed experts only of models"
                " in one stage"
            )
        if self.data_parallel_size > 1:
            raise ValueError(f"data_parallel_size is {self.data_parallel_size}: not tested with routed experts; use 1")

    def weight_format(self) -> WeightFormat:
        """Format in which the trainer sends weights: `quantization` if it is set, otherwise the model's dtype."""
        return self.quantization or "dtype"

    def check_model(self, keys: Mapping[str, Any]) -> None:
        """Raise `ValueError` for experts by rows or that ranks cannot divide, and for sides that no fp8 block fits."""
        super().check_model(keys)
        _check_encoder(keys)
        if self.quantization == "fp8" and has_experts(keys):
            raise ValueError("quantization: fp8 does not support mixtures of experts: use fp8_per_block")
        self.check_experts(keys)
        if self.quantization == "fp8_per_block":
            sharing = self.tensor_parallel_size
            _check_blocks(keys, sharing, 1 if self.enable_expert_parallel else sharing)

    def check_images(self, keys: Mapping[str, Any], kind: MediaKind, prompt: int) -> None:
        """Raise `ValueError` if a video may have more tokens than vLLM's encoder cache, which rejects its request."""
        limits = self.engine_arguments().get("limit_mm_per_prompt") or {}
        size = self.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
        if kind == "video" and not limits.get("video") and size < prompt:
            raise ValueError(
                f"a video may have prompt_length = {prompt} tokens, but vLLM's encoder cache has room for"
                f" max_num_batched_tokens = {size}: set max_num_batched_tokens to {prompt}, or limit_mm_per_prompt to"
                " {video: 1}, for which vLLM reserves memory"
            )

    def check_experts(self, keys: Mapping[str, Any]) -> None:
        """Raise `ValueError` if expert parallelism is set for a model without experts, or if the ranks cannot divide
        them. A model with code of its own may have experts under any key."""
        if not self.enable_expert_parallel or "model_type" not in keys or "auto_map" in keys:
            return
        experts, tensor, data = num_experts(keys), self.tensor_parallel_size, self.data_parallel_size
        if not experts and data > 1:
            raise ValueError(
                f"data_parallel_size is {data}, but a {keys['model_type']} has no experts: remove"
                f" enable_expert_parallel and data_parallel_size, {MORE_REPLICAS}"
            )
        if not experts:
            raise ValueError(f"enable_expert_parallel: a {keys['model_type']} has no experts: remove the key")
        if experts % (tensor * data):
            ranks = f"tensor_parallel_size {tensor}"
            if data > 1:
                ranks += f" × data_parallel_size {data} = {tensor * data}"
            raise ValueError(
                f"enable_expert_parallel: {experts} experts cannot be divided by {ranks}, the number of ranks that"
                " share them"
            )

    def slots_per_worker(self) -> int:
        """Number of slots per worker: tensor × pipeline × data parallel size."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def several_nodes_problem(self) -> str:
        """Reason why the slots of a worker must be on one node; empty if they may be on several."""
        if self.data_parallel_size > 1:
            return f"data_parallel_size is {self.data_parallel_size}, whose ranks must be on one node"
        return ""

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments passed to vLLM: keys that are set or have a default other than None."""
        arguments = super().engine_arguments()
        if self.quantization:
            arguments |= {"quantization": QUANTIZATION[self.quantization], "load_format": "dummy"}
        return arguments


def _check_encoder(keys: Mapping[str, Any]) -> None:
    """Raise `ValueError` if vLLM leaves out layers of the image encoder, which trainers have and publish."""
    encoder = keys.get("vision_config", {}).get("model_type", CUT_ENCODERS[0])
    if keys.get("model_type") in LLAVAS and encoder in CUT_ENCODERS:
        raise ValueError(
            f"vLLM loads the image encoder ({encoder}) of a {keys['model_type']} without its last norm and the layers"
            " after vision_feature_layer, so that no weight update can be proven: use strategy hf_infer"
        )


def _check_blocks(keys: Mapping[str, Any], num_ranks: int, expert_ranks: int) -> None:
    """Raise `ValueError` for the first matrix whose sides on a rank are not multiples of the block's 128.

    `num_ranks` share each matrix of a layer, `expert_ranks` each expert. Only keys that `keys` has are checked; vLLM
    checks the rest when it builds the model.
    """
    text = keys.get("text_config")
    keys = {**keys, **text} if isinstance(text, dict) else keys
    if keys.get("kv_lora_rank"):
        raise ValueError(
            "quantization: fp8_per_block does not support latent attention (kv_lora_rank): the matrices that vLLM"
            " computes from kv_b_proj could not be compared with the sent one"
        )
    heads, hidden = keys.get("num_attention_heads"), keys.get("hidden_size")
    sides = {"hidden_size": (hidden, 1)}
    for name in ("intermediate_size", "shared_expert_intermediate_size"):
        sides[name] = keys.get(name), num_ranks
    sides["moe_intermediate_size"] = keys.get("moe_intermediate_size"), expert_ranks
    if heads and hidden:
        head = keys.get("head_dim") or hidden // heads
        groups = keys.get("num_key_value_heads") or heads
        sides["num_attention_heads × head_dim"] = heads * head, num_ranks
        sides["num_key_value_heads × head_dim"] = groups * head, min(num_ranks, groups)
    for name, (size, parts) in sides.items():
        if size and (size % parts or size // parts % BLOCK):
            split = f" / tensor_parallel_size {parts} = {size / parts:g}" if parts > 1 else ""
            raise ValueError(
                f"{name} {size}{split} is not a multiple of {BLOCK}, the side of the blocks of fp8_per_block: use"
                " fewer ranks, or for a dense model quantization: fp8, which has scales per row"
            )
