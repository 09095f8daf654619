"""Configuration of the FSDP2 strategies.

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from roll_core.spec.config import Config, PositiveInt
from roll_modeling.model_table import FLAT_ATTENTION, check_flat, check_tried, has_experts
from roll_modeling.strategy_config import HuggingFaceConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.providers import ModelParallelism

DType = Literal["fp32", "bf16"]


class WrapPolicy(Config):
    """`wrap_policy`: the modules that `fully_shard` wraps, each gathered and freed as a unit."""

    transformer_layer_cls_to_wrap: list[str] = Field(default_factory=list)
    """Class names of the layers to wrap. Default: the model's `_no_split_modules`, or if it has none, the classes in
    its list of all layers.

    The parameters outside these layers (embeddings, final norm, head) form one more unit. It is gathered once per
    forward and backward pass.
    """


class FSDP2Config(HuggingFaceConfig):
    """`strategy_config` of `fsdp2_train` and `fsdp2_infer`."""

    fsdp_size: PositiveInt | None = None
    """Number of ranks that shard one copy of the model; with tensor parallelism, of groups of tensor-parallel ranks.

    Default: all ranks of the role. A smaller divisor of their number selects HSDP: adjacent ranks shard one replica,
    and gradients are all-reduced across the replicas.
    """
    tensor_model_parallel_size: PositiveInt = 1
    """Degree of tensor parallelism: adjacent ranks that compute each sequence together.

    Each rank computes some of the heads, hidden units and experts of every layer, according to the model's
    `base_model_tp_plan` (transformers).
    """
    ulysses_size: PositiveInt = 1
    """Degree of Ulysses context parallelism, in groups of `tensor_model_parallel_size` adjacent ranks.

    The groups split the tokens of each microbatch. Around attention, an all-to-all exchanges tokens for heads.
    """
    ring_size: PositiveInt = 1
    """Degree of context parallelism by ring attention: keys and values circulate among the ranks.

    It does not split heads, so their number does not limit it. It is slower than `ulysses_size` if the heads suffice.
    """
    ep_size: PositiveInt = 1
    """Degree of expert parallelism: adjacent ranks among which the experts of each MoE layer are distributed.

    Each rank holds some of the experts; FSDP shards them further over `fsdp_size / ep_size` ranks. An all-to-all sends
    the tokens of all these ranks to their experts, according to the model's `base_model_ep_plan` (transformers).
    Divides `fsdp_size`.
    """
    param_dtype: DType | None = None
    """Dtype of the parameters during forward and backward passes.

    Default: `model_args.dtype`. The optimizer updates float32 master weights.
    """
    reduce_dtype: DType = "fp32"
    """Dtype in which gradients are reduced over the ranks."""
    reshard_after_forward: bool | None = None
    """Free the gathered parameters after the forward pass and gather them again for the backward pass.

    This trades communication for memory. Default: true for layers, false for the rest of the model.
    """
    reduce_scatter_during_grad_accumulation: bool = False
    """Reduce-scatter gradients after each microbatch instead of once per call.

    This costs communication, but no rank stores the unsharded gradients of the whole model.
    """
    offload_policy: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory, and run the optimizer step there."""
    async_save_ckpt: bool = False
    """Copy checkpoint shards to host memory and write them in the background during the next steps.

    Until the files are written, the copies need as much host memory as the shards of parameters and optimizer state. If
    false, training continues only after the checkpoint is written.
    """
    wrap_policy: WrapPolicy = WrapPolicy()
    """Modules that are gathered and freed as a unit."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.ulysses_size > 1 and self.ring_size > 1:
            raise ValueError("ulysses_size and ring_size exclude each other: set one of them")
        if self.ep_size > 1 and self.tensor_model_parallel_size > 1:
            raise ValueError(
                "tensor_model_parallel_size above 1 distributes the experts, too: remove ep_size, or"
                " tensor_model_parallel_size"
            )
        split = next((key for key in ("tensor_model_parallel_size", "ep_size") if getattr(self, key) > 1), None)
        if self.torch_compile and split is not None:
            raise ValueError(f"torch_compile does not compile layers that {split} splits: remove one of them")
        return self

    @property
    def context_size(self) -> int:
        """Degree of context parallelism, by Ulysses or by ring attention."""
        return max(self.ulysses_size, self.ring_size)

    @property
    def context_key(self) -> str:
        """The configuration key that sets the degree of context parallelism."""
        return "ring_size" if self.ring_size > 1 else "ulysses_size"

    @override
    def parallel_sizes(self) -> Mapping[ModelParallelism, int]:
        return {
            "tensor_parallel": self.tensor_model_parallel_size,
            "context_parallel": self.context_size,
            "expert_parallel": self.ep_size,
        }

    @override
    def check_model(self, keys: Mapping[str, Any]) -> None:
        super().check_model(keys)
        if self.ep_size > 1 and "model_type" in keys and "auto_map" not in keys and not has_experts(keys):
            raise ValueError(f"ep_size is {self.ep_size}, but a model of type {keys['model_type']} has no experts")
        package = __name__.partition(".")[0]
        if self.context_size > 1:
            try:
                check_flat(keys)
            except ValueError as error:
                raise ValueError(self._needs_flat(str(error))) from error
        if self.ulysses_size > 1:
            check_tried(keys, package, "context_parallel")
        if self.tensor_model_parallel_size > 1:
            check_tried(keys, package, "tensor_parallel")

    @override
    def check_model_args(self, model_args: Mapping[str, Any]) -> None:
        super().check_model_args(model_args)
        for key, size in (("tensor_model_parallel_size", self.tensor_model_parallel_size), ("ep_size", self.ep_size)):
            for kind in ("use_dora", "target_parameters", "load_in_4bit"):
                if size > 1 and model_args.get(kind) and (key, kind) != ("ep_size", "use_dora"):
                    raise ValueError(f"{key} is {size}, but model_args.{kind} needs whole weights: remove one of them")
        attention = model_args.get("attn_implementation", "auto")
        if self.context_size > 1 and attention not in ("auto", FLAT_ATTENTION):
            raise ValueError(self._needs_flat(f"attn_implementation: {attention} requires padding (set it to auto)"))

    def _needs_flat(self, reason: str) -> str:
        return (
            f"{self.context_key} is {self.context_size}, but {reason}; context parallelism supports only models without"
            f" padding: remove {self.context_key}"
        )

    def replica_arithmetic(self) -> str:
        """The product of the parallel sizes of one data-parallel group, for error messages."""
        together = f"{self.context_key} {self.context_size}"
        return f"tensor_model_parallel_size {self.tensor_model_parallel_size} × {together}"
