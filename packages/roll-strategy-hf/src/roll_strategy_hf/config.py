"""Configuration of `hf_train`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.spec.config import PositiveInt, StrategyConfig
from roll_modeling.architectures import CAUSAL_LM, CLASSIFIER, check_buildable

if TYPE_CHECKING:
    from collections.abc import Mapping


class HFTrainConfig(StrategyConfig):
    """`strategy_config` of `hf_train`."""

    logprob_chunk_tokens: PositiveInt | None = None
    """Tokens whose logits exist at once while logprobs and entropy are computed; by vocabulary and device where not
    given."""
    fused: bool = True
    """Norms and gated activations by faster equivalents, where these exist and give the same numbers."""
    async_save_ckpt: bool = False
    """Copy a checkpoint's weights and optimizer state to the host and write them while the next steps run: takes the
    host as much memory as they are large, for so long."""

    @override
    def check_architecture(self, keys: Mapping[str, Any]) -> None:
        check_buildable(keys, CAUSAL_LM, CLASSIFIER)

    @override
    def check_router_replay(self, keys: Mapping[str, Any]) -> None:
        from roll_modeling.routing import check_routers

        check_routers(keys)
