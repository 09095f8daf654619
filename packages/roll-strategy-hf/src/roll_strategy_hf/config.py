"""Configuration of `hf_train`."""

from __future__ import annotations

from roll_core.spec.config import PositiveInt  # noqa: TC001 - pydantic reads the annotation
from roll_modeling.architectures import TransformersConfig


class HFTrainConfig(TransformersConfig):
    """`strategy_config` of `hf_train`."""

    logprob_chunk_tokens: PositiveInt | None = None
    """Number of tokens whose logits are materialized at once to compute logprobs and entropy. Default: chosen by
    vocabulary size and device."""
    fused: bool = True
    """Replace norms and gated activations by faster fused equivalents where these exist and give the same numbers."""
    async_save_ckpt: bool = False
    """Write checkpoints in the background: copy weights and optimizer state to host memory, then write them during the
    next steps. The copy occupies host memory until it is written."""
