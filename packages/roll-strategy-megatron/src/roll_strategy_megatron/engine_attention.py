"""Transformer Engine's core attention over packed sequences. Imported only if Transformer Engine is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TEDotProductAttention

if TYPE_CHECKING:
    from torch import Tensor

    from roll_strategy_megatron.packing import Packed


class EngineAttention(TEDotProductAttention):  # type: ignore[misc]
    """Transformer Engine's attention that also supports values smaller than keys (latent attention).

    Transformer Engine supports these only for unpacked sequences. Here values are padded with zeros, and the
    corresponding part of the output is dropped.
    """

    def __init__(
        self,
        *,
        scale: float,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **options: Any,
    ) -> None:
        """`scale` of the attention scores overrides `softmax_scale`, which Megatron passes."""
        del softmax_scale
        super().__init__(
            softmax_scale=scale,
            k_channels=k_channels,
            v_channels=k_channels,
            **options,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *arguments: Any,
        packed_seq_params: Packed,
        **options: Any,
    ) -> Tensor:
        """Attention of `[L, H, D]` queries, `[L, K, D]` keys and values.

        Returns `[L, H · D]`, with D the head size of the values.
        """
        size, missing = value.shape[-1], key.shape[-1] - value.shape[-1]
        if missing:
            value = F.pad(value, (0, missing))
        attended: Tensor = super().forward(
            query, key, value, *arguments, packed_seq_params=packed_seq_params.on_device(query.device), **options
        )
        return attended.reshape(query.shape)[..., :size].flatten(-2) if missing else attended
