"""Configuration of the Megatron strategies, with the key names of Megatron and ROLL. Imports no torch.

    ranks of the role = tensor × pipeline × context × data parallel

Experts are distributed over the tensor × context × data parallel ranks of a stage, in groups of expert tensor × expert
parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from roll_core.spec.config import NonNegativeFloat, PositiveInt, StrategyConfig
from roll_core.spec.platform import EnvVar
from roll_modeling.model_table import NUMBER_OF_EXPERTS, check_lora, check_tried, has_experts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.providers import ModelParallelism

PACKAGE = __name__.partition(".")[0]
TRANSFORMER_ENGINE = "it is a kernel of Transformer Engine that has not been tried here"
DROPS = (
    "with it a token's logprobs would depend on what else is in its microbatch; moe_aux_loss_coeff keeps experts from"
    " getting too many"
)
REFUSED = {
    "overlap_param_gather": "weights are read between steps (exports, scoring), when they must be whole",
    "delay_grad_reduce": "each stage adds its gradients up as soon as they are there, with overlap_grad_reduce",
    "ddp_average_in_collective": "gradients are sums here: what a batch's loss is divided by is in the loss",
    "apply_rope_fusion": TRANSFORMER_ENGINE,
    "moe_permute_fusion": TRANSFORMER_ENGINE,
    "moe_router_fusion": TRANSFORMER_ENGINE,
    "cross_entropy_loss_fusion": "logprobs are computed in chunks, and losses from logprobs",
    "torch_compile": "Megatron's layers communicate between their parts, and compiling them is not tested",
    "bias_activation_fusion": "Megatron recompiles it for each length of a microbatch",
    "moe_expert_capacity_factor": DROPS,
    "moe_pad_expert_input_to_capacity": DROPS,
    "moe_token_drop_policy": DROPS,
    "moe_router_bias_update_rate": "the biases by which DeepSeek-V3 chooses experts stay as they are stored",
    "moe_input_jitter_eps": "jitter is random, but recomputed logprobs must be equal",
    "moe_shared_expert_overlap": "it computes shared experts on a CUDA stream of their own, which has not been tried",
    "moe_enable_routing_replay": "router_replay.mode, a key of the run, says whether the engine's experts are replayed",
    "mtp_num_layers": "layers that predict several tokens are not supported",
    "cuda_graph_impl": "microbatches differ in length",
    "cuda_graph_scope": "microbatches differ in length",
    "use_precision_aware_optimizer": "moments and masters are float32",
    "additional_configs": "keys that nothing checks would be ignored when they are misspelt",
}
"""Keys in configs written for ROLL that are not supported, and why. A value that disables the feature is accepted."""
MICROBATCHES = (
    "its gradient depends on how a batch is cut into microbatches; seq_aux_loss balances each sequence by itself"
)
BALANCED_OTHERWISE = {
    "aux_loss": MICROBATCHES,
    "global_aux_loss": MICROBATCHES,
    "sinkhorn": "it chooses other experts in training than the engine that generates",
}
"""Values of `moe_router_load_balancing_type` that Megatron supports and ROLL does not, and why."""
DENSE = (
    "ernie4_5",
    "gemma2",
    "gemma3_text",
    "glm4",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
)
"""Model types without experts."""
LATENT = ("deepseek_v2", "deepseek_v3")
"""Model types with latent attention."""
EXPERTS_ONLY = ("gpt_oss", "minimax_m2", "mixtral", "olmoe")
"""Model types in which every feed-forward layer is an MoE layer; `intermediate_size` is the size of an expert."""
DENSE_FIRST = (*LATENT, "dots1", "glm4_moe")
"""Model types whose first `first_k_dense_replace` layers have no experts."""
DENSE_BETWEEN = ("qwen2_moe", "qwen3_moe")
"""Model types that put dense layers between MoE layers by `mlp_only_layers` and `decoder_sparse_step`."""
BIASED_EXPERTS = ("gpt_oss",)
"""Model types whose experts have biases."""
ARCHITECTURES = (*DENSE, *EXPERTS_ONLY, *DENSE_FIRST, *DENSE_BETWEEN)
"""Model types that the bridge supports without other packages."""
SIGMOID = ("deepseek_v3", "dots1", "glm4_moe", "minimax_m2")
"""Model types whose routers score experts by sigmoids."""
QKV_BIASED = ("glm4", "glm4_moe", "gpt_oss", "seed_oss")
"""Model types of which `attention_bias` adds biases that Megatron's layers have."""
LINEAR_ATTENTION = (
    "its layers of linear attention: Megatron's GatedDeltaNet rejects packed sequences and context parallelism"
)
SPARSE_ATTENTION = "its sparse attention: Megatron's DSAttention rejects packed sequences"
NOT_EXPRESSIBLE = {
    "qwen3_next": LINEAR_ATTENTION,
    "qwen3_5_text": LINEAR_ATTENTION,
    "qwen3_5_moe_text": LINEAR_ATTENTION,
    "deepseek_v32": SPARSE_ATTENTION,
    "glm_moe_dsa": SPARSE_ATTENTION,
    "ernie4_5_moe": "its routers: they add a bias to softmax scores, and Megatron adds one only to sigmoid scores",
}
"""Model types that Megatron's layers cannot compute, and why."""
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings whose frequencies do not depend on the sequences."""
PLAIN = {"attention_bias": (False,), "mlp_bias": (False,), "hidden_act": ("silu", "swish")}
GEMMA = {"attention_bias": (False,), "use_bidirectional_attention": (False,)}
ONLY: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    **{
        kind: {key: values for key, values in PLAIN.items() if key != "attention_bias" or kind not in QKV_BIASED}
        | ({"norm_topk_prob": (True,)} if kind in SIGMOID else {})
        for kind in ARCHITECTURES
    },
    "deepseek_v2": PLAIN | {"topk_method": ("greedy",)},
    "deepseek_v3": PLAIN | {"norm_topk_prob": (True,), "rope_interleave": (True,)},
    "ernie4_5": PLAIN | {"use_bias": (False,)},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt_oss": {"attention_bias": (True,), "swiglu_alpha": (1.702,)},
    "olmoe": PLAIN | {"clip_qkv": ()},
    "seed_oss": PLAIN | {"attention_bias": (True, False), "attention_out_bias": (False,)},
}
"""Keys of a model's config for which the bridge supports only some values, beside None."""
ENTRY_POINTS = "roll.megatron_architectures"
"""Entry point group by which packages add architectures."""
RECOMPUTATION = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "moe_layer_recompute",
    "activation_offloading",
)
"""Keys that configure gradient checkpointing."""
NO_ADAPTERS = {
    "rank_pattern": "remove it, or train with fsdp2_train",
    "alpha_pattern": "remove it, or train with fsdp2_train",
    "use_dora": "remove it, or train with fsdp2_train",
    "target_parameters": "name the experts' layers in lora_target, such as mlp.experts.up_proj",
}
"""Keys of adapters that Megatron's layers do not have, with what to do instead."""
MASTERS_APART = (
    "models in bf16 that are trained whole (model_args.dtype: bf16, no lora_target): of tensors in float32 Megatron can"
    " put no copies on the host"
)
EXPERT_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
"""Parallel sizes that, above 1, require a model with experts."""
OF_EXPERTS = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_layer_recompute", "moe_grouped_gemm")
"""Other keys that require a model with experts."""
OF_TRAINING = (
    *RECOMPUTATION,
    "overlap_grad_reduce",
    "ddp_bucket_size",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "async_save_ckpt",
)
"""Keys without effect in `megatron_infer`, which runs neither backward passes nor optimizer steps."""
ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
Fraction = Annotated[float, Field(gt=0, le=1)]
NO: tuple[Any, ...] = (None, False, 0, 0.0, "none", [], {})


class MegatronConfig(StrategyConfig):
    """`strategy_config` of `megatron_train`."""

    tensor_model_parallel_size: PositiveInt = 1
    """Degree of tensor parallelism: ranks that shard the matrices of each layer. They should be on one host."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Number of pipeline stages: groups of ranks with different layers, through which microbatches are pipelined."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Number of model chunks per stage (interleaved schedule).

    More chunks mean a smaller pipeline bubble and more communication. A step's microbatches are padded to a multiple of
    `pipeline_model_parallel_size` by idle ones.
    """
    pipeline_model_parallel_layout: str | None = None
    """Layers of each model chunk in Megatron's notation; the chunks of all stages follow one another.

    `E` is the embedding, `t` a layer, `L` the output layer, and a bar separates chunks; `t*3` is three layers. Default:
    an even split.
    """
    context_parallel_size: PositiveInt = 1
    """Degree of context parallelism: ranks that split the tokens of each sequence."""
    expert_model_parallel_size: PositiveInt = 1
    """Degree of expert parallelism: ranks over which the experts of each MoE layer are distributed."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Degree of tensor parallelism within each expert. Default: `tensor_model_parallel_size`."""
    sequence_parallel: bool = False
    """Split the activations between layers by tokens over the tensor-parallel ranks, which saves memory.

    With a `tensor_model_parallel_size` above 1, it is required for training MoE models, for
    `expert_model_parallel_size` above 1, and for latent attention.
    """
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layer implementation: Megatron's own modules (`local`) or Transformer Engine's.

    `auto` selects Transformer Engine for bf16 models on CUDA if it is installed. Checkpoints are the same for both.
    """
    attention_backend: Literal["auto", "flash", "fused"] = "auto"
    """Attention kernel of Transformer Engine's layers: flash-attn, cuDNN (`fused`), or the faster one (`auto`).

    It replaces the variables NVTE_FLASH_ATTN and NVTE_FUSED_ATTN, which Megatron sets.
    """
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer when layers are split into stages."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer as a layer when layers are split into stages."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Number of layers of the first pipeline stage. The other stages share the rest evenly."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Number of layers of the last pipeline stage. The other stages share the rest evenly."""
    use_distributed_optimizer: Literal[True] = True
    """Shard the optimizer state over data-parallel ranks. Always on; it changes memory use, not results."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over replicas bucket by bucket during the backward pass of the last microbatch."""
    ddp_bucket_size: PositiveInt | None = None
    """With `overlap_grad_reduce`: number of parameters per bucket on the first stage; other stages have one bucket.

    Default (Megatron's): 40 million, or 1 million per replica if that is more.
    """
    optimizer_cpu_offload: bool = False
    """Keep AdamW's moments in host memory and run the optimizer step there (Megatron's HybridDeviceOptimizer).

    Per parameter of a rank's shard, it saves 8 bytes on the device and needs 16 on the host. Steps are slower.
    """
    optimizer_offload_fraction: Fraction = 1.0
    """With `optimizer_cpu_offload`: fraction of a rank's parameters that are offloaded, in full tensors."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """With `optimizer_cpu_offload`: copy gradients and parameters of some tensors while others are updated."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """What to recompute in the backward pass if `model_args` enables gradient checkpointing.

    `full` (default): whole layers. `selective`: the modules in `recompute_modules`.
    """
    recompute_method: Literal["uniform", "block"] | None = None
    """With `full`: recompute in groups of `recompute_num_layers` layers (`uniform`, default), or only the first
    `recompute_num_layers` layers of each stage (`block`)."""
    recompute_num_layers: PositiveInt | None = None
    """Number of layers, see `recompute_method`. With `uniform`, a divisor of the layers of each model chunk.

    Default: 1.
    """
    recompute_modules: list[Literal["core_attn", "mlp", "moe"]] | None = None
    """With `selective`: the recomputed modules. Default: `core_attn`.

    `mlp` are dense feed-forward layers, `moe` those with experts. Megatron's other values are for Transformer Engine
    and not tested.
    """
    activation_offloading: bool = False
    """With `full`: keep the inputs of recomputed layers in pinned host memory until the backward pass needs them.

    No effect on a CPU.
    """
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """Token dispatcher of MoE layers.

    With `allgather`, all ranks that share experts receive all tokens, and microbatches are padded to the longest of
    these ranks.
    """
    moe_grouped_gemm: bool | None = None
    """Compute a rank's experts together by Transformer Engine's GroupedLinear instead of one after another.

    Default: true with Transformer Engine's layers.
    """
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Dtype of the router computation."""
    moe_layer_recompute: bool = False
    """Add `moe` to `recompute_modules`. `recompute_granularity` then defaults to `selective`."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss that each MoE layer adds to the objective; 0.001 is common.

    Reported as `load_balancing_loss`, which is 1 if all experts are used equally.
    """
    moe_router_load_balancing_type: Literal["seq_aux_loss", "none"] = "seq_aux_loss"
    """Type of the load-balancing loss: the balance within each trained sequence, averaged over the sequences of a
    step."""
    moe_z_loss_coeff: NonNegativeFloat = 0.0
    """Coefficient of the router z-loss, the mean square of the log-sum-exp of router logits; 0.001 is common.

    It keeps router logits small. Reported as `router_z_loss`.
    """
    logprob_chunk_tokens: PositiveInt | None = None
    """Tokens per chunk when logprobs and entropy are computed; the logits of one chunk are in memory at a time.

    Default: depends on the vocabulary size and the device.
    """
    async_save_ckpt: bool = False
    """Copy checkpoints to host memory and write them in the background during the next steps.

    Until the files are written, the copies need 12 bytes of host memory per parameter, divided over the hosts. If
    false, training continues only after the checkpoint is written.
    """

    @property
    def trains(self) -> bool:
        """True if the strategy has an optimizer."""
        return True

    @property
    def runs_per_stage(self) -> int:
        """Number of model chunks per stage; 1 unless the schedule is interleaved."""
        if self.pipeline_model_parallel_layout is not None:
            return len(runs(self.pipeline_model_parallel_layout)) // self.pipeline_model_parallel_size
        return self.virtual_pipeline_model_parallel_size or 1

    @override
    def parallel_sizes(self) -> Mapping[ModelParallelism, int]:
        return {
            "tensor_parallel": self.tensor_model_parallel_size,
            "pipeline_parallel": self.pipeline_model_parallel_size,
            "context_parallel": self.context_parallel_size,
            "expert_parallel": self.expert_model_parallel_size,
        }

    def replica_arithmetic(self) -> str:
        """The product of the parallel sizes of one replica, for error messages."""
        return (
            f"tensor_model_parallel_size {self.tensor_model_parallel_size} × pipeline_model_parallel_size"
            f" {self.pipeline_model_parallel_size} × context_parallel_size {self.context_parallel_size}"
        )

    @property
    def recomputation(self) -> Literal["full", "selective"]:
        """Granularity of recomputation if `model_args` enables gradient checkpointing."""
        return self.recompute_granularity or ("selective" if self.moe_layer_recompute else "full")

    @property
    def recomputed_modules(self) -> list[str]:
        """Modules that `selective` recomputes."""
        modules: list[str] = [*(self.recompute_modules or ("core_attn",))]
        return [*modules, "moe"] if self.moe_layer_recompute and "moe" not in modules else modules

    def worker_environment(self) -> tuple[EnvVar, ...]:
        """Environment variables of the worker processes: CUDA_DEVICE_MAX_CONNECTIONS with tensor or context
        parallelism."""
        if self.tensor_model_parallel_size == self.context_parallel_size == 1:
            return ()
        why = "Megatron begins to communicate before it computes, and relies on the device to begin in the same order"
        return (EnvVar(name="CUDA_DEVICE_MAX_CONNECTIONS", value="1", reason=why),)

    def check_model(self, keys: Mapping[str, Any]) -> None:
        """Check the model's config keys against this strategy config.

        Raises `ValueError` if the bridge does not support the architecture, if layers, heads, hidden units or experts
        cannot be divided evenly, or for keys of experts with a dense model.
        """
        _check_architecture(keys.get("model_type"))
        _check_values(keys)
        self._check_biased_experts(keys.get("model_type"))
        layers = keys.get("num_hidden_layers")
        if isinstance(layers, int):
            self._check_layers(layers)
        for key, number, over, ranks in self._divided(keys):
            if isinstance(number, int) and number % ranks:
                raise ValueError(f"the model's {key} {number} is not a multiple of {over} {ranks}")
        self.check_sequence_parallel(experts=has_experts(keys), latent=keys.get("model_type") in LATENT)
        asked = [key for key in EXPERT_SIZES if (getattr(self, key) or 1) > 1]
        asked += [key for key in OF_EXPERTS if getattr(self, key)]
        asked += ["recompute_modules: [moe]"] if "moe" in (self.recompute_modules or ()) else []
        if asked and keys.get("model_type") in DENSE:
            raise ValueError(f"{asked[0]} is for models with experts; a {keys['model_type']} has none")

    @override
    def check_architecture(self, keys: Mapping[str, Any]) -> str | None:
        if keys.get("model_type") not in ARCHITECTURES:  # `check_model` rejects it, or another package brings it
            return None
        return check_tried(keys, PACKAGE, "start", "forward", "step", "publish", "export")

    @override
    def check_adapters(self, keys: Mapping[str, Any], model_args: Mapping[str, Any]) -> str | None:
        if keys.get("model_type") not in ARCHITECTURES:
            return None
        return check_lora(keys, PACKAGE, model_args.get("lora_target"))

    def _check_biased_experts(self, model_type: object) -> None:
        if model_type in BIASED_EXPERTS and (self.expert_tensor_parallel_size or self.tensor_model_parallel_size) > 1:
            raise ValueError(
                f"the experts of a {model_type} have biases, which Megatron supports only for experts that are not"
                " split: set expert_tensor_parallel_size: 1"
            )

    def check_sequence_parallel(self, *, experts: bool, latent: bool) -> None:
        """Raise `ValueError` if the model requires sequence parallelism with tensor parallelism, and it is off."""
        if self.tensor_model_parallel_size == 1 or self.sequence_parallel:
            return
        beside = "under a tensor_model_parallel_size above 1 needs sequence_parallel: true"
        if latent:
            raise ValueError(f"a model with latent attention {beside}")
        if experts and self.trains:
            raise ValueError(f"training a model with experts {beside}; where it only scores, megatron_infer does not")

    def check_model_args(self, model_args: Mapping[str, Any]) -> None:
        """Raise `ValueError` for recomputation keys without gradient checkpointing, and for unsupported optimizer
        offload."""
        asked = [key for key in RECOMPUTATION if getattr(self, key)]
        if asked and model_args.get("disable_gradient_checkpointing") is True:
            raise ValueError(
                f"model_args.disable_gradient_checkpointing is true, which disables recomputation: remove it"
                f" or {', '.join(asked)}"
            )
        for key, instead in NO_ADAPTERS.items():
            if model_args.get(key):
                raise ValueError(f"model_args.{key} is not implemented on Megatron's layers: {instead}")
        if self.optimizer_cpu_offload and (model_args.get("dtype") == "fp32" or model_args.get("lora_target")):
            raise ValueError(f"optimizer_cpu_offload is for {MASTERS_APART}")

    @override
    def check_router_replay(self, keys: Mapping[str, Any]) -> None:
        if keys.get("model_type") in DENSE:
            raise ValueError(f"needs a mixture of experts, and the model is of type {keys['model_type']}")

    def _divided(self, keys: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, int]]:
        """Sizes of the model, each with the key of the number of ranks that must divide it, and that number."""
        tensor = "tensor_model_parallel_size", self.tensor_model_parallel_size
        expert_size = self.expert_tensor_parallel_size
        of_expert = ("expert_tensor_parallel_size", expert_size) if expert_size else tensor
        kind, size, shared = (keys.get(key) for key in ("model_type", "moe_intermediate_size", "n_shared_experts"))
        for key in ("num_attention_heads", "num_key_value_heads"):
            yield key, keys.get(key), *tensor
        if kind in EXPERTS_ONLY:
            yield "intermediate_size", keys.get("intermediate_size"), *of_expert
        elif _has_dense_layers(keys):
            yield "intermediate_size", keys.get("intermediate_size"), *tensor
        yield "moe_intermediate_size", size, *of_expert
        # Megatron computes a layer's shared experts as one, sharded like a dense layer.
        yield "shared_expert_intermediate_size", keys.get("shared_expert_intermediate_size"), *tensor
        if isinstance(size, int) and isinstance(shared, int):
            yield f"moe_intermediate_size {size} × n_shared_experts {shared} =", size * shared, *tensor
        for key in NUMBER_OF_EXPERTS:
            yield key, keys.get(key), "expert_model_parallel_size", self.expert_model_parallel_size

    def _check_layers(self, layers: int) -> None:
        if self.pipeline_model_parallel_layout is not None:
            chunks = [run.count("t") for run in runs(self.pipeline_model_parallel_layout)]
            if sum(chunks) != layers:
                raise ValueError(f"pipeline_model_parallel_layout has {sum(chunks)} layers (t), the model {layers}")
            self._check_recomputed(chunks)
            return
        if self._ends:
            self._check_recomputed(self._with_ends(layers))
            return
        ends = [
            f" + 1 for {end}"
            for end, counted in (
                ("the embedding", self.account_for_embedding_in_pipeline_split),
                ("the output layer", self.account_for_loss_in_pipeline_split),
            )
            if counted
        ]
        counted = f"num_hidden_layers {layers}{''.join(ends)}" + (f" = {layers + len(ends)}" if ends else "")
        stages, of_stage = self.pipeline_model_parallel_size, self.runs_per_stage
        number = f"pipeline_model_parallel_size {stages}"
        if of_stage > 1:
            number += f" × virtual_pipeline_model_parallel_size {of_stage} = {stages * of_stage}"
        if (layers + len(ends)) % (stages * of_stage):
            raise ValueError(f"the model's {counted} is not a multiple of {number}")
        chunks = [(layers + len(ends)) // (stages * of_stage)] * (stages * of_stage)
        chunks[0] -= self.account_for_embedding_in_pipeline_split
        chunks[-1] -= self.account_for_loss_in_pipeline_split
        self._check_recomputed(chunks)

    @property
    def _ends(self) -> dict[str, int]:
        """Numbers of layers of the first and the last stage, if they are set."""
        return {key: number for key in ENDS if (number := getattr(self, key)) is not None}

    def _with_ends(self, layers: int) -> list[int]:
        """Layers of model chunks, without order, if those of the first or the last stage are set."""
        ends, of_stage = self._ends, self.runs_per_stage
        between, rest = self.pipeline_model_parallel_size - len(ends), layers - sum(ends.values())
        if rest < 0 or bool(rest) != bool(between) or (between and rest % (between * of_stage)):
            arithmetic = " - ".join((f"num_hidden_layers {layers}", *(f"{key} {size}" for key, size in ends.items())))
            number = f"{between} other stages" + (
                f" × virtual_pipeline_model_parallel_size {of_stage} = {between * of_stage}" if of_stage > 1 else ""
            )
            raise ValueError(f"the model's {arithmetic} = {rest} layers cannot be divided over {number}")
        return [size // of_stage for size in (*ends.values(), *([rest // between] if between else []))]

    def _check_recomputed(self, chunks: list[int]) -> None:
        """Check that groups of recomputed layers are whole in each model chunk; Megatron would index beyond its end."""
        group = self.recompute_num_layers
        uneven = [num_layers for num_layers in chunks if group and num_layers % group]
        if uneven and self.recompute_method != "block":
            raise ValueError(
                f"recompute_num_layers {group} does not divide a model chunk of {uneven[0]} layers, as"
                " recompute_method: uniform requires"
            )

    @model_validator(mode="before")
    @classmethod
    def _say_why(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key, reason in REFUSED.items():
            if key in data and data[key] not in NO:
                raise ValueError(f"{key} is not supported: {reason}")
        kind = data.get("moe_router_load_balancing_type")
        if isinstance(kind, str) and kind in BALANCED_OTHERWISE:
            raise ValueError(f"moe_router_load_balancing_type: {kind} is not supported: {BALANCED_OTHERWISE[kind]}")
        return {key: value for key, value in data.items() if key not in REFUSED}

    @model_validator(mode="after")
    def _fits_together(self) -> MegatronConfig:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError("sequence_parallel needs a tensor_model_parallel_size above 1")
        experts = self.expert_model_parallel_size > 1
        if experts and self.tensor_model_parallel_size > 1 and not self.sequence_parallel:
            raise ValueError(
                "expert_model_parallel_size with a tensor_model_parallel_size above 1 needs sequence_parallel: true"
            )
        if self.moe_token_dispatcher_type == "allgather" and self.pipeline_model_parallel_size > 1:
            raise ValueError(
                "moe_token_dispatcher_type: allgather and pipeline_model_parallel_size above 1 exclude each other:"
                " between stages, Megatron supports it only for microbatches of equal length. Use alltoall"
            )
        if self.moe_aux_loss_coeff and self.moe_router_load_balancing_type == "none":
            raise ValueError("moe_aux_loss_coeff has no effect with moe_router_load_balancing_type: none")
        if self.ddp_bucket_size and not self.overlap_grad_reduce:
            raise ValueError("ddp_bucket_size requires overlap_grad_reduce: true")
        offload = {"optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"} & self.model_fields_set
        if offload and not self.optimizer_cpu_offload:
            raise ValueError(f"{min(offload)} requires optimizer_cpu_offload: true")
        if self.transformer_impl == "local" and (self.moe_grouped_gemm or self.attention_backend != "auto"):
            key = "moe_grouped_gemm: true" if self.moe_grouped_gemm else f"attention_backend: {self.attention_backend}"
            raise ValueError(f"{key} requires Transformer Engine's layers, but transformer_impl is local")
        self._check_runs()
        if self.activation_offloading and (self.recomputation == "selective" or self.recompute_method == "block"):
            raise ValueError(
                "activation_offloading requires recompute_granularity: full and recompute_method: uniform, so that"
                " layers keep only their inputs"
            )
        if self.recompute_granularity != "full" and (self.recompute_method or self.recompute_num_layers):
            raise ValueError("recompute_method and recompute_num_layers require recompute_granularity: full")
        if self.recompute_granularity != "selective" and self.recompute_modules is not None:
            raise ValueError("recompute_modules requires recompute_granularity: selective")
        return self

    def _check_runs(self) -> None:
        stages, virtual = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        if virtual is not None and virtual > 1 and stages == 1:
            raise ValueError(
                "virtual_pipeline_model_parallel_size above 1 needs a pipeline_model_parallel_size above 1"
            )
        layout = self.pipeline_model_parallel_layout
        for key, number in self._ends.items():
            if stages == 1:
                raise ValueError(f"{key} needs a pipeline_model_parallel_size above 1")
            if number % (virtual or 1):
                raise ValueError(f"{key} {number} is not a multiple of virtual_pipeline_model_parallel_size {virtual}")
            others = ("pipeline_model_parallel_layout", *COUNTED)
            if beside := [other for other in others if getattr(self, other)]:
                raise ValueError(f"{key} sets the layers of the stages: remove it, or {', '.join(beside)}")
        if layout is None:
            return
        if any(getattr(self, key) for key in COUNTED):
            raise ValueError(
                "pipeline_model_parallel_layout places the embedding and the output layer: remove"
                " account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split"
            )
        number = len(runs(layout))
        if number > 1 and stages == 1:
            raise ValueError(
                f"pipeline_model_parallel_layout has {number} runs of layers, which needs a"
                " pipeline_model_parallel_size above 1"
            )
        if number % stages:
            raise ValueError(
                f"pipeline_model_parallel_layout has {number} runs of layers, which is not a multiple of"
                f" pipeline_model_parallel_size {stages}"
            )
        if virtual is not None and virtual * stages != number:
            raise ValueError(
                f"pipeline_model_parallel_layout has {number} runs of layers, but pipeline_model_parallel_size {stages}"
                f" × virtual_pipeline_model_parallel_size {virtual} = {stages * virtual}"
            )


class ScoringConfig(MegatronConfig):
    """`strategy_config` of `megatron_infer`: rejects the keys in `OF_TRAINING`, unless their value disables the
    feature."""

    @property
    @override
    def trains(self) -> bool:
        return False

    @model_validator(mode="before")
    @classmethod
    def _only_scores(cls, data: Any) -> Any:
        for key in OF_TRAINING if isinstance(data, dict) else ():
            if data.get(key) not in (*NO, cls.model_fields[key].default):
                raise ValueError(f"{key} has no effect in megatron_infer, which only scores: remove it")
        return data


def _has_dense_layers(keys: Mapping[str, Any]) -> bool:
    """True unless all feed-forward layers are known to have experts."""
    kind = keys.get("model_type")
    if kind in DENSE_BETWEEN:
        return bool(keys.get("mlp_only_layers")) or keys.get("decoder_sparse_step", 1) != 1
    return kind not in EXPERTS_ONLY and keys.get("first_k_dense_replace") != 0


def _check_values(keys: Mapping[str, Any]) -> None:
    """Raise `ValueError` for values of a model's config that Megatron's layers cannot compute."""
    kind = keys.get("model_type")
    for key, values in ONLY.get(str(kind), {}).items():
        value = keys.get(key)
        if value is not None and value not in values:
            supported = " or ".join(str(value).lower() for value in values) or "null"
            raise ValueError(f"{kind}: {key} is {str(value).lower()}; the bridge supports only {supported}")
    if (quantization := keys.get("quantization_config")) and isinstance(quantization, Mapping):
        raise ValueError(
            f"{kind}: the files are quantized ({quantization.get('quant_method')}); the bridge reads only unquantized"
            " weights, so convert them first"
        )
    rotation = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    nested = (
        [value for value in rotation.values() if isinstance(value, Mapping)] if isinstance(rotation, Mapping) else []
    )
    for rope in nested or [rotation]:
        name = rope.get("rope_type") or rope.get("type") if isinstance(rope, Mapping) else None
        if name and name not in ROTATIONS:
            raise ValueError(
                f"{kind}: rotary embeddings of type {name!r} are not supported, because their frequencies depend on the"
                f" sequences' length; supported are {', '.join(ROTATIONS)}"
            )
    if kind in SIGMOID:
        _check_groups(keys)


def _check_groups(keys: Mapping[str, Any]) -> None:
    """Megatron scores a group by its best `num_experts_per_tok // topk_group` experts, transformers by its best two."""
    groups, chosen, top_k = (keys.get(key) for key in ("n_group", "topk_group", "num_experts_per_tok"))
    if not (isinstance(groups, int) and isinstance(chosen, int) and isinstance(top_k, int)):
        return
    if chosen < groups and top_k // chosen != 2:
        raise ValueError(
            f"{keys['model_type']}: num_experts_per_tok {top_k} is not twice topk_group {chosen}, and Megatron would"
            " choose other groups"
        )


def _check_architecture(model_type: object) -> None:
    if not isinstance(model_type, str) or model_type in ARCHITECTURES:
        return
    brought = {entry.name for entry in entry_points(group=ENTRY_POINTS)}
    if model_type in NOT_EXPRESSIBLE and model_type not in brought:
        raise ValueError(
            f"Megatron's layers cannot compute a {model_type}: {NOT_EXPRESSIBLE[model_type]}. Use fsdp2_train"
        )
    known = sorted({*ARCHITECTURES, *brought})
    if model_type not in known:
        raise ValueError(
            f"Megatron's bridge has no architecture {model_type}; it has {', '.join(known)}. fsdp2_train supports any,"
            f" and a package can add one by the entry point {ENTRY_POINTS}"
        )


def runs(layout: str) -> list[str]:
    """Model chunks of a `pipeline_model_parallel_layout`, with repetitions expanded.

    `Et|(tt|)*2L` becomes `Et`, `tt`, `tt`, `L`. Raises `ValueError` for an invalid layout.
    """
    text = layout.replace(",", "").replace(" ", "")
    for repeated in (r"\(([^()]+)\)\*(\d+)", r"([EtL|])\*(\d+)"):
        text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
    stages = text.split("|")
    if not re.fullmatch(r"E[t|]*L", text):
        raise ValueError(
            f"pipeline_model_parallel_layout {layout!r} does not begin with E, end with L and have only t and | between"
        )
    return stages
