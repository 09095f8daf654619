"""Configuration of the FSDP2 strategies. Light."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from roll_core.spec.config import Config, PositiveInt, StrategyConfig
from roll_modeling.architectures import CAUSAL_LM, CLASSIFIER, check_buildable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.providers import ModelParallelism

DType = Literal["fp32", "bf16"]


class WrapPolicy(Config):
    """`wrap_policy`: what is gathered and freed as one."""

    transformer_layer_cls_to_wrap: list[str] = Field(default_factory=list)
    """Class names of the layers; the model's own list (`_no_split_modules`) where not given. What stands in no such
    layer (embeddings, last norm, head) is gathered together, once for a forward and its backward pass."""


class FSDP2Config(StrategyConfig):
    """`strategy_config` of `fsdp2_train` and `fsdp2_infer`."""

    fsdp_size: PositiveInt | None = None
    """Ranks that share one copy of the model (with tensor parallelism: groups of `tensor_model_parallel_size` ranks);
    all of the role's where not given. A divisor of their number gives HSDP: copies of the model on neighbouring ranks,
    whose gradients are then added up."""
    tensor_model_parallel_size: PositiveInt = 1
    """Neighbouring ranks that compute every sequence together, each with some of the heads, hidden units and experts
    of every layer, as the model's own plan says (`base_model_tp_plan` of transformers)."""
    ulysses_size: PositiveInt = 1
    """Groups of `tensor_model_parallel_size` neighbouring ranks that share the tokens of every microbatch, and exchange
    them for heads around attention: context parallelism for long sequences."""
    ring_size: PositiveInt = 1
    """The same by ring attention, instead: keys and values go round among the ranks. It takes no heads to deal out, and
    more time than `ulysses_size` where there are enough of them."""
    ep_size: PositiveInt = 1
    """Neighbouring ranks that hold each some whole experts of every mixture, to which the tokens of all of them travel,
    as the model's own plan says (`base_model_ep_plan` of transformers): expert parallelism. Divides `fsdp_size`."""
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
    async_save_ckpt: bool = False
    """Copy a checkpoint's shares to the host and write them while the next steps run: takes the host as much memory as
    the shares of parameters and optimizer state, for so long. Where not given, a step waits until all is written."""
    wrap_policy: WrapPolicy = WrapPolicy()
    """What is gathered and freed as one."""
    logprob_chunk_tokens: PositiveInt | None = None
    """Tokens whose logits exist at once while logprobs and entropy are computed; by vocabulary and device where not
    given."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.ulysses_size > 1 and self.ring_size > 1:
            raise ValueError("ulysses_size and ring_size are two ways to share tokens: set one of them")
        if self.ep_size > 1 and self.tensor_model_parallel_size > 1:
            raise ValueError(
                "tensor_model_parallel_size spreads the experts over its own ranks: leave ep_size out, or spread"
                " nothing but experts"
            )
        return self

    @property
    def context_size(self) -> int:
        """Ranks that share tokens, in whichever way."""
        return max(self.ulysses_size, self.ring_size)

    @property
    def context_key(self) -> str:
        """What the way is called."""
        return "ring_size" if self.ring_size > 1 else "ulysses_size"

    @override
    def parallel_sizes(self) -> Mapping[ModelParallelism, int]:
        return {
            "tensor_parallel": self.tensor_model_parallel_size,
            "context_parallel": self.context_size,
            "expert_parallel": self.ep_size,
        }

    def replica_arithmetic(self) -> str:
        """Spelled out."""
        together = f"{self.context_key} {self.context_size}"
        return f"tensor_model_parallel_size {self.tensor_model_parallel_size} × {together}"

    @override
    def check_architecture(self, keys: Mapping[str, Any]) -> None:
        check_buildable(keys, CAUSAL_LM, CLASSIFIER)

    @override
    def check_router_replay(self, keys: Mapping[str, Any]) -> None:
        from roll_modeling.routing import check_routers

        check_routers(keys)
