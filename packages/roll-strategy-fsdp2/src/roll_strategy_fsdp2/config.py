"""Configuration of the FSDP2 strategies. Light."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll_core.spec.config import Config, PositiveInt, StrategyConfig

DType = Literal["fp32", "bf16"]


class WrapPolicy(Config):
    """`wrap_policy`: what is gathered and freed as one."""

    transformer_layer_cls_to_wrap: list[str] = Field(default_factory=list)
    """Class names of the layers; the model's own list (`_no_split_modules`) where not given. What stands in no such
    layer (embeddings, last norm, head) is gathered together, once for a forward and its backward pass."""


class FSDP2Config(StrategyConfig):
    """`strategy_config` of `fsdp2_train` and `fsdp2_infer`."""

    fsdp_size: PositiveInt | None = None
    """Ranks that share one copy of the model; all of the role's where not given. A divisor of their number gives
    HSDP: copies of the model, each on `fsdp_size` neighbouring ranks, whose gradients are then added up."""
    param_dtype: DType | None = None
    """Of the parameters while they compute, `model_args.dtype` where not given. What is stepped stays in float32."""
    reduce_dtype: DType = "fp32"
    """In which gradients travel and are added up."""
    reshard_after_forward: bool | None = None
    """Free a layer's gathered parameters after its forward pass and gather them again for the backward pass: memory
    for communication. Where not given, layers do and the rest of the model does not."""
    reduce_scatter_during_grad_accumulation: bool = False
    """Add gradients up over ranks after each microbatch instead of once per call: costs the communication, saves the
    memory of gradients of the whole model on each rank."""
    offload_policy: bool = False
    """Keep sharded parameters, gradients and optimizer state on the host, where the step is then taken."""
    wrap_policy: WrapPolicy = WrapPolicy()
    """What is gathered and freed as one."""
    logprob_chunk_tokens: PositiveInt | None = None
    """Tokens whose logits exist at once while logprobs and entropy are computed; by the vocabulary where not given."""
