"""Configuration of `hf_train`."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from roll_modeling.strategy_config import HuggingFaceConfig


class HFTrainConfig(HuggingFaceConfig):
    """`strategy_config` of `hf_train`."""

    fused: bool = True
    """Replace norms, gated activations and rotary embeddings by fused ones, if they exist and give the same numbers."""
    async_save_ckpt: bool = False
    """Write checkpoints in the background: copy weights and optimizer state to host memory, then write them during the
    next steps. The copy occupies host memory until it is written."""

    @model_validator(mode="after")
    def _compiles_or_fuses(self) -> Self:
        if self.torch_compile and self.fused and "fused" in self.model_fields_set:
            raise ValueError("torch_compile replaces fused: remove one of them")
        return self
