"""Configuration of `hf_infer`, the embedded engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from roll_core.spec.config import NonNegativeInt, PositiveFloat, PositiveInt, StrategyConfig
from roll_modeling.model_table import (
    CAUSAL_LM,
    IMAGE_TEXT,
    check_buildable,
    check_positions,
    check_tried,
    key_problems,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class HFInferConfig(StrategyConfig):
    """`strategy_config` of the embedded engine `hf_infer`."""

    max_num_seqs: PositiveInt = 256
    """Maximum number of sequences that are decoded in one batch; further sequences wait."""
    max_num_batched_tokens: PositiveInt = 8192
    """Maximum number of prompt tokens that are prefilled between two decoding steps. Longer prompts are prefilled in
    chunks."""
    kv_cache_gib: PositiveFloat = 4.0
    """Memory for the KV cache of running sequences, in GiB. Sequences whose longest possible response would not fit
    wait. An accelerator allocates it with the first request."""
    min_shared_prefix: NonNegativeInt = 32
    """Minimum number of common leading tokens for which two prompts share the prefill. 0: only equal prompts share."""
    pack_weights: bool = True
    """On a CPU, pack large weights into oneDNN's layout. Decoding is up to twice as fast. Packing doubles the memory of
    these weights and copies them at each weight update. Ignored for architectures that run through transformers' own
    code."""
    kernels: Literal["auto", "torch", "compiled"] = "auto"
    """Kernels for the operations of a decoding step other than matrix products. `torch` uses PyTorch operators.
    `compiled` compiles custom kernels once per machine and raises an error if that fails. `auto` uses compiled kernels
    on a CPU with roll-kernels and a C++ compiler, and PyTorch operators otherwise. `compiled` on CUDA needs nvcc and is
    not tested on a GPU."""
    enable_lora: bool = False
    """Receive the LoRA adapter instead of merged weights. A weight update sends only A and B, which the engine merges
    into its initial weights. The engine keeps a copy of the base weights of adapted layers."""
    kv_after_update: Literal["keep", "recompute"] = "keep"
    """KV cache of running sequences after a weight update: `keep` the old keys and values (as other engines do), or
    `recompute` them with the new weights."""

    @override
    def serves_adapters(self) -> bool:
        return self.enable_lora

    @override
    def check_architecture(self, keys: Mapping[str, Any]) -> str | None:
        return check_buildable(keys, CAUSAL_LM, IMAGE_TEXT) or check_tried(
            keys, __name__.partition(".")[0], "start", "decode"
        )

    @override
    def check_model(self, keys: Mapping[str, Any]) -> None:
        check_tried(keys, __name__.partition(".")[0], "publish")

    @override
    def key_problems(self, model_type: str, overrides: Mapping[str, Any]) -> Mapping[str, str]:
        return key_problems(model_type, overrides)

    @override
    def check_positions(self, keys: Mapping[str, Any], prompt: int, response: int) -> None:
        check_positions(keys, prompt, response)

    @override
    def check_router_replay(self, keys: Mapping[str, Any]) -> None:
        from roll_modeling.routing import check_routers

        check_routers(keys, "router_replay")
