"""Transformer Engine's core attention over packed sequences. Imported only where Transformer Engine is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TEDotProductAttention

if TYPE_CHECKING:
    from torch import Tensor


class EngineAttention(TEDotProductAttention):  # type: ignore[misc]
    """For values that are smaller than keys, too (latent attention), which it takes of sequences side by side alone:
    they are filled up with zeros, and what comes of these is cut off."""

    def __init__(
        self,
        *,
        scale: float | None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **options: Any,
    ) -> None:
        """`scale` of the scores goes before what Megatron computes."""
        super().__init__(
            softmax_scale=softmax_scale if scale is None else scale,
            k_channels=k_channels,
            v_channels=k_channels,
            **options,
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """`[L, H, D]` queries and `[L, K, D]` keys and values to `[L, H · D]`, D that of the values."""
        size, missing = value.shape[-1], key.shape[-1] - value.shape[-1]
        if missing:
            value = F.pad(value, (0, missing))
        found: Tensor = super().forward(query, key, value, *arguments, **options)
        return found.reshape(query.shape)[..., :size].flatten(-2) if missing else found
