"""`strategy_config` of `deepspeed_train` and `deepspeed_infer`: the keys of a DeepSpeed configuration file.

Batch sizes, clipping, the optimizer and the precision follow from other parts of the run's config. Their keys may be
set to `auto` here, as in files written for other trainers.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from roll_core.spec.config import Config, NonNegativeInt, PositiveInt
from roll_modeling.strategy_config import HuggingFaceConfig

Auto = Literal["auto"]
Elements = PositiveInt | Auto
"""A number of elements (not bytes). DeepSpeed's files may write it as a float, 5e8."""


class OffloadConfig(Config):
    """`offload_optimizer` and `offload_param`."""

    device: Literal["none", "cpu"] = "none"
    """Where the tensors are kept; `cpu` is host memory."""
    pin_memory: bool = True
    """Use page-locked (pinned) memory for faster copies; ignored if the device is the CPU."""


class ZeroConfig(Config):
    """`zero_optimization`: the ZeRO stage and its options."""

    stage: Literal[0, 1, 2, 3] = 0
    """What is sharded over the ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    overlap_comm: bool | None = None
    """Reduce gradients during the backward pass. Default: DeepSpeed's choice for the stage."""
    contiguous_gradients: bool = True
    """Copy gradients into a contiguous buffer as they are computed, which reduces fragmentation."""
    reduce_scatter: bool = True
    """Reduce each part of the gradients only to the rank that owns it, instead of all-reducing."""
    reduce_bucket_size: Elements = "auto"
    """Number of elements reduced at a time."""
    allgather_partitions: bool = True
    """Gather updated parameters by all-gather instead of broadcasts."""
    allgather_bucket_size: Elements = "auto"
    """Number of elements gathered at a time after a step."""
    round_robin_gradients: bool = False
    """Stages 1 and 2: distribute the copies of offloaded gradients evenly over the ranks."""
    sub_group_size: Elements = "auto"
    """Stage 3: number of elements that the optimizer updates at a time."""
    stage3_prefetch_bucket_size: NonNegativeInt | Auto = "auto"
    """Stage 3: number of elements that are prefetched before use."""
    stage3_param_persistence_threshold: NonNegativeInt | Auto = "auto"
    """Stage 3: parameters with fewer elements stay gathered on every rank between steps."""
    stage3_max_live_parameters: Elements = "auto"
    """Stage 3: maximum number of gathered elements on one rank."""
    stage3_max_reuse_distance: Elements = "auto"
    """Stage 3: a parameter stays gathered if it is used again within this number of elements."""
    stage3_gather_16bit_weights_on_model_save: bool = True
    """Accepted for files that set it; exports always gather the weights."""
    offload_optimizer: OffloadConfig = OffloadConfig()
    """Stages 1 to 3: keep the optimizer state in host memory and run the optimizer step on the CPU."""
    offload_param: OffloadConfig = OffloadConfig()
    """Stage 3: keep parameters in host memory while they are unused."""

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, data: Any) -> Any:
        """Convert whole floats to integers: DeepSpeed's files write 5e8, which YAML reads as a float."""
        if not isinstance(data, dict):
            return data
        return {
            key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in data.items()
        }

    @model_validator(mode="after")
    def _stage_allows(self) -> ZeroConfig:
        if self.offload_optimizer.device != "none" and self.stage == 0:
            raise ValueError("offload_optimizer needs stage 1, 2 or 3, and stage is 0")
        if self.offload_param.device != "none" and self.stage != 3:
            raise ValueError(f"offload_param needs stage 3, and stage is {self.stage}")
        return self


class BF16Config(Config):
    """`bf16`: accepted for files that set it."""

    enabled: bool | Auto = "auto"
    """Follows the role's `model_args.dtype`. A contradictory value is an error when the role starts."""


class FP16Config(Config):
    """`fp16`: loss scaling for roles whose `model_args.dtype` is `fp16`."""

    enabled: bool | Auto = "auto"
    """Follows the role's `model_args.dtype`. A contradictory value is an error when the role starts."""
    loss_scale: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """A fixed loss scale; 0 selects dynamic loss scaling."""
    initial_scale_power: NonNegativeInt = 16
    """The dynamic loss scale starts at 2 to this power."""
    loss_scale_window: PositiveInt = 1000
    """Number of steps without overflow after which the loss scale doubles."""
    hysteresis: PositiveInt = 2
    """Number of overflows after which the loss scale halves."""
    min_loss_scale: PositiveInt = 1
    """Lower bound of the loss scale."""


class DeepSpeedConfig(HuggingFaceConfig):
    """`strategy_config` of `deepspeed_train` and `deepspeed_infer`."""

    zero_optimization: ZeroConfig = ZeroConfig()
    """ZeRO: sharding over the ranks and offload to host memory."""
    bf16: BF16Config = BF16Config()
    """Accepted for files that set it."""
    fp16: FP16Config = FP16Config()
    """Loss scaling in float16."""
    communication_data_type: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype in which gradients are reduced over the ranks, independent of the model's dtype."""
    zero_force_ds_cpu_optimizer: Literal[False] = False
    """Accepted for files that set it; torch's fused AdamW runs the optimizer step, also on the CPU."""
    zero_allow_untested_optimizer: bool = True
    """Accepted for files that set it."""
    train_batch_size: Auto = "auto"
    """Accepted for files that set it; follows from `training_args`."""
    train_micro_batch_size_per_gpu: Auto = "auto"
    """Accepted for files that set it; follows from `training_args`."""
    gradient_accumulation_steps: Auto = "auto"
    """Accepted for files that set it; follows from `training_args`."""
    gradient_clipping: Auto = "auto"
    """Accepted for files that set it; follows from the pipeline's `max_grad_norm`."""
    steps_per_print: PositiveInt | None = None
    """Accepted for files that set it; a run writes its own metrics."""
    wall_clock_breakdown: Literal[False] = False
    """Accepted for files that set it."""
    fused: bool = True
    """Use fused norms, gated activations and rotary embeddings, if they exist and give the same results.

    Applies to CPU devices only.
    """

    @model_validator(mode="after")
    def _check_compiled(self) -> Self:
        if self.torch_compile and self.fused and "fused" in self.model_fields_set:
            raise ValueError("torch_compile replaces fused: remove one of them")
        if self.torch_compile and self.zero_optimization.stage == 3:
            raise ValueError(
                "torch_compile does not compile layers whose parameters zero_optimization.stage 3 gathers one by one:"
                " use stage 2, or remove torch_compile"
            )
        return self
