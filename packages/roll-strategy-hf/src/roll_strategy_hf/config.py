"""Configuration of `hf_train`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.spec.config import PositiveInt, StrategyConfig
from roll_modeling.architectures import (
    CAUSAL_LM,
    CLASSIFIER,
    IMAGE_TEXT,
    check_buildable,
    check_positions,
    key_problems,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class HFTrainConfig(StrategyConfig):
    """`strategy_config` of `hf_train`."""

    logprob_chunk_tokens: PositiveInt | None = None
    """Tokens per chunk when logprobs and entropy are computed.

    The logits of one chunk are in memory at a time, and the log-softmax of up to four. Default: depends on the
    vocabulary size and the device.
    """
    fused: bool = True
    """Replace norms, gated activations and rotary embeddings by fused ones, if they exist and give the same numbers."""
    async_save_ckpt: bool = False
    """Write checkpoints in the background: copy weights and optimizer state to host memory, then write them during the
    next steps. The copy occupies host memory until it is written."""

    @override
    def check_architecture(self, keys: Mapping[str, Any]) -> None:
        check_buildable(keys, CAUSAL_LM, IMAGE_TEXT, CLASSIFIER)

    @override
    def key_problems(self, model_type: str, given: Mapping[str, Any]) -> Mapping[str, str]:
        return key_problems(model_type, given)

    @override
    def check_positions(self, keys: Mapping[str, Any], prompt: int, response: int) -> None:
        check_positions(keys, prompt, response)

    @override
    def check_router_replay(self, keys: Mapping[str, Any]) -> None:
        from roll_modeling.routing import check_routers

        check_routers(keys)
