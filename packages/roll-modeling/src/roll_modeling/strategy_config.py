"""`HuggingFaceConfig`: what the configuration of train strategies for Hugging Face models has in common.

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator
from typing_extensions import override

from roll_core.spec.config import NonNegativeFloat, PositiveInt, StrategyConfig
from roll_modeling.model_table import (
    CAUSAL_LM,
    CLASSIFIER,
    IMAGE_TEXT,
    check_buildable,
    check_lora,
    check_positions,
    check_tried,
    joined,
    key_problems,
    untrained,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class HuggingFaceConfig(StrategyConfig):
    """Base of the `strategy_config` of strategies that derive from `HuggingFaceStrategy`."""

    logprob_chunk_tokens: PositiveInt | None = None
    """Tokens per chunk when logprobs and entropy are computed.

    The logits of one chunk are in memory at a time, and the log-softmax of up to four. Default: depends on the
    vocabulary size and the device.
    """
    recompute_granularity: Literal["full", "selective"] | None = None
    """What to recompute in the backward pass if `model_args` enables gradient checkpointing.

    `full` (default): whole layers. `selective`: what is cheap. Outputs of linear layers and of attention kernels are
    kept, which saves most of the recomputation and takes more memory.
    """
    activation_offloading: bool = False
    """Keep the inputs of recomputed layers in pinned host memory until the backward pass needs them.

    Not with `recompute_granularity: selective`. No effect on a CPU.
    """
    torch_compile: bool = False
    """Compile the layers by `torch.compile`, once for microbatches of all lengths.

    The first step takes a minute or more. Attention over tokens without padding is not compiled. On a CPU, compiled
    layers replace those of `fused`.
    """

    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss that each MoE layer adds to the objective; 0.001 is common.

    Reported as `load_balancing_loss`, which is 1 if all experts are used equally.
    """
    moe_z_loss_coeff: NonNegativeFloat = 0.0
    """Coefficient of the mean squared log-normalizer of the routers' logits. Reported as `router_z_loss`."""

    @property
    def router_loss(self) -> str:
        """A key that enables losses of routers; empty if none does."""
        keys = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
        return next((key for key in keys if getattr(self, key)), "")

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if self.recompute_granularity == "selective" and self.activation_offloading:
            raise ValueError(
                "activation_offloading offloads only inputs of layers, but recompute_granularity: selective keeps more"
                " on the device: set it to full, or remove activation_offloading"
            )
        if self.recompute_granularity == "selective" and self.torch_compile:
            raise ValueError(
                "recompute_granularity: selective chooses among single operators, which torch_compile joins: remove"
                " one of them"
            )
        if self.torch_compile and self.router_loss:
            raise ValueError(f"torch_compile does not compile losses of routers: remove it, or {self.router_loss}")
        return self

    @override
    def check_model(self, keys: Mapping[str, Any]) -> None:
        if key := self.router_loss:
            from roll_modeling.routing import check_routers

            check_routers(keys, key)

    @override
    def check_model_args(self, model_args: Mapping[str, Any]) -> None:
        asked = [key for key in ("recompute_granularity", "activation_offloading") if getattr(self, key)]
        if asked and model_args.get("disable_gradient_checkpointing") is True:
            raise ValueError(
                f"model_args.disable_gradient_checkpointing is true, which disables recomputation: remove it or"
                f" {', '.join(asked)}"
            )
        if self.router_loss and model_args.get("dtype") == "fp16":
            raise ValueError(f"{self.router_loss} is not supported in fp16, whose losses are scaled: use bf16 or fp32")
        if self.torch_compile and model_args.get("load_in_4bit") is True:
            raise ValueError("torch_compile does not compile layers of model_args.load_in_4bit: remove one of them")

    @override
    def check_architecture(self, keys: Mapping[str, Any]) -> str | None:
        package = type(self).__module__.partition(".")[0]
        return check_buildable(keys, CAUSAL_LM, IMAGE_TEXT, CLASSIFIER) or joined(
            check_tried(keys, package, "start", "forward", "step", "publish", "export"), untrained(keys)
        )

    @override
    def check_adapters(self, keys: Mapping[str, Any], model_args: Mapping[str, Any]) -> str | None:
        return check_lora(keys, type(self).__module__.partition(".")[0], model_args.get("lora_target"))

    @override
    def check_scores(self, keys: Mapping[str, Any]) -> str | None:
        return check_buildable(keys, CLASSIFIER)

    @override
    def key_problems(self, model_type: str, overrides: Mapping[str, Any]) -> Mapping[str, str]:
        return key_problems(model_type, overrides)

    @override
    def check_positions(self, keys: Mapping[str, Any], prompt: int, response: int) -> None:
        check_positions(keys, prompt, response)

    @override
    def check_router_replay(self, keys: Mapping[str, Any]) -> None:
        from roll_modeling.routing import check_routers

        if self.torch_compile:
            raise ValueError("torch_compile does not compile replaced experts: remove it, or router_replay")
        check_routers(keys, "router_replay")
