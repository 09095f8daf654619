"""`strategy_config` of `deepspeed_train` and `deepspeed_infer`: the keys of a DeepSpeed configuration file.

What other parts of a run's config decide (batch sizes, clipping, the optimizer, the precision) cannot be decided here a
second time: such keys may stand here as `auto`, which is how files made for other trainers write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from roll_core.spec.config import Config, NonNegativeInt, PositiveInt, StrategyConfig
from roll_modeling.architectures import CAUSAL_LM, CLASSIFIER, check_buildable

if TYPE_CHECKING:
    from collections.abc import Mapping

Auto = Literal["auto"]
Elements = PositiveInt | Auto
"""A number of elements, not bytes; whole, though files write 5e8."""


class OffloadConfig(Config):
    """`offload_optimizer`, `offload_param`."""

    device: Literal["none", "cpu"] = "none"
    """Where it lives: `cpu` is the host's memory."""
    pin_memory: bool = True
    """In page-locked memory, for faster copies; ignored where the host is the device."""


class ZeroConfig(Config):
    """`zero_optimization`."""

    stage: Literal[0, 1, 2, 3] = 0
    """What is spread over the ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    overlap_comm: bool | None = None
    """Reduce gradients while the backward pass goes on; DeepSpeed's own choice by the stage where not given."""
    contiguous_gradients: bool = True
    """Copy gradients side by side as they come: less fragmentation."""
    reduce_scatter: bool = True
    """Reduce each part of the gradients to its owner only."""
    reduce_bucket_size: Elements = "auto"
    """Elements reduced at a time."""
    allgather_partitions: bool = True
    """Gather updated parameters by one collective rather than by broadcasts."""
    allgather_bucket_size: Elements = "auto"
    """Elements gathered at a time after a step."""
    round_robin_gradients: bool = False
    """Stages 1 and 2: spread the copies of offloaded gradients evenly over the ranks."""
    sub_group_size: Elements = "auto"
    """Stage 3: elements that are stepped at a time."""
    stage3_prefetch_bucket_size: NonNegativeInt | Auto = "auto"
    """Stage 3: elements gathered before they are used."""
    stage3_param_persistence_threshold: NonNegativeInt | Auto = "auto"
    """Stage 3: parameters smaller than this are whole on every rank between steps."""
    stage3_max_live_parameters: Elements = "auto"
    """Stage 3: elements that may be whole at a time on one rank."""
    stage3_max_reuse_distance: Elements = "auto"
    """Stage 3: a parameter that is used again within so many elements stays whole."""
    stage3_gather_16bit_weights_on_model_save: bool = True
    """Accepted for files that set it; exports always gather the weights."""
    offload_optimizer: OffloadConfig = OffloadConfig()
    """Stages 1 to 3: keep the optimizer's state and take the step on the host."""
    offload_param: OffloadConfig = OffloadConfig()
    """Stage 3: keep parameters on the host while they are not used."""

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, data: Any) -> Any:
        """DeepSpeed's files write 5e8, which YAML reads as a float."""
        if not isinstance(data, dict):
            return data
        return {key: int(each) if isinstance(each, float) and each.is_integer() else each for key, each in data.items()}

    @model_validator(mode="after")
    def _stage_allows(self) -> ZeroConfig:
        if self.offload_optimizer.device != "none" and self.stage == 0:
            raise ValueError("offload_optimizer needs stage 1, 2 or 3, and stage is 0")
        if self.offload_param.device != "none" and self.stage != 3:
            raise ValueError(f"offload_param needs stage 3, and stage is {self.stage}")
        return self


class BF16Config(Config):
    """`bf16`."""

    enabled: bool | Auto = "auto"
    """The role's `model_args.dtype` decides; a value that contradicts it is refused when the role starts."""


class FP16Config(Config):
    """`fp16`: how the loss is scaled where the role's `model_args.dtype` is `fp16`."""

    enabled: bool | Auto = "auto"
    """The role's `model_args.dtype` decides; a value that contradicts it is refused when the role starts."""
    loss_scale: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """A fixed factor; 0 finds the factor while it trains."""
    initial_scale_power: NonNegativeInt = 16
    """The factor begins at 2 to this power."""
    loss_scale_window: PositiveInt = 1000
    """Steps without overflow after which the factor doubles."""
    hysteresis: PositiveInt = 2
    """Overflows after which the factor halves."""
    min_loss_scale: PositiveInt = 1
    """The factor never falls below."""


class DeepSpeedConfig(StrategyConfig):
    """`strategy_config` of `deepspeed_train` and `deepspeed_infer`."""

    zero_optimization: ZeroConfig = ZeroConfig()
    """What is spread over the ranks, and what lives on the host."""
    bf16: BF16Config = BF16Config()
    """Accepted for files that set it."""
    fp16: FP16Config = FP16Config()
    """How the loss is scaled."""
    communication_data_type: Literal["fp32", "bf16", "fp16"] = "fp32"
    """In which gradients are summed over ranks, whatever the model's dtype."""
    zero_force_ds_cpu_optimizer: Literal[False] = False
    """Accepted for files that set it: torch's own fused AdamW takes the steps, on the host as well."""
    zero_allow_untested_optimizer: bool = True
    """Accepted for files that set it."""
    train_batch_size: Auto = "auto"
    """`training_args` decides."""
    train_micro_batch_size_per_gpu: Auto = "auto"
    """`training_args` decides."""
    gradient_accumulation_steps: Auto = "auto"
    """`training_args` decides."""
    gradient_clipping: Auto = "auto"
    """The pipeline's `max_grad_norm` decides."""
    steps_per_print: PositiveInt | None = None
    """Accepted for files that set it; a run writes its own metrics."""
    wall_clock_breakdown: Literal[False] = False
    """Accepted for files that set it."""
    logprob_chunk_tokens: PositiveInt | None = None
    """Tokens whose logits exist at once while logprobs and entropy are computed; by the vocabulary where not given."""
    fused: bool = True
    """Norms and gated activations by faster equivalents, where these exist and give the same numbers."""

    @override
    def check_architecture(self, keys: Mapping[str, Any]) -> None:
        check_buildable(keys, CAUSAL_LM, CLASSIFIER)

    @override
    def check_router_replay(self, keys: Mapping[str, Any]) -> None:
        from roll_modeling.routing import check_routers

        check_routers(keys)
