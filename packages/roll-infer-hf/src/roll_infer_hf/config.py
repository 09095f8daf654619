"""Configuration of `hf_infer`, the embedded engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from roll_core.spec.config import NonNegativeInt, PositiveFloat, PositiveInt, StrategyConfig
from roll_modeling.architectures import CAUSAL_LM, check_buildable, check_cached

if TYPE_CHECKING:
    from collections.abc import Mapping


class HFInferConfig(StrategyConfig):
    """`strategy_config` of the embedded engine `hf_infer`."""

    max_num_seqs: PositiveInt = 256
    """Sequences that are decoded together; further ones wait."""
    max_num_batched_tokens: PositiveInt = 8192
    """Prompt tokens computed between two decoding steps; longer prompts are computed in pieces."""
    kv_cache_gib: PositiveFloat = 4.0
    """Memory for keys and values of running sequences; sequences whose longest possible response would not fit wait."""
    min_shared_prefix: NonNegativeInt = 32
    """Prompts that begin with at least so many equal tokens compute these once; 0 shares only equal prompts."""
    pack_weights: bool = True
    """On a CPU, lay large weights out for the processor: up to twice as fast, for as much memory again and one
    copy when new weights arrive. Architectures that run through transformers' own code do without."""
    kernels: Literal["auto", "torch", "compiled"] = "auto"
    """What a decoding step does between its matrix products: on a CPU kernels that are compiled once for this machine
    (`auto`: where there is a C++ compiler; `compiled`: an error without one), or torch's operators. On CUDA `auto` is
    torch's operators; `compiled` are kernels that nvcc compiles, and that no GPU has run yet."""
    enable_lora: bool = False
    """Take the trained adapter as it is: a publish brings A and B alone, which the engine adds to the weights that it
    was started with. It keeps a copy of those that have an adapter."""
    kv_after_update: Literal["keep", "recompute"] = "keep"
    """Keys and values of running sequences after a weight update: keep the old ones (what other engines do),
    or compute them again under the new ones."""

    @override
    def serves_adapters(self) -> bool:
        return self.enable_lora

    @override
    def check_architecture(self, keys: Mapping[str, Any]) -> None:
        check_buildable(keys, CAUSAL_LM)
        check_cached(keys)

    @override
    def check_router_replay(self, keys: Mapping[str, Any]) -> None:
        from roll_modeling.routing import check_routers

        check_routers(keys)
