"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1) in Megatron's layers, with complete gradients.

    hidden --down--> latent [+ rotated key, one for all heads] --norm, up--> heads of this rank

Without Transformer Engine, Megatron splits the two down-projections over tensor-parallel ranks and gathers their
outputs. In the backward pass, each rank then has the gradient of the shared key from its own heads only. Megatron does
not sum these gradients. Here each rank holds the full down-projections, as Megatron does with Transformer Engine, and
applies them to its own tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


class Down(nn.Module):
    """Linear layer that is replicated on all tensor-parallel ranks and applied to each rank's own tokens."""

    def __init__(self, config: Any, inputs: int, outputs: int, group: Any) -> None:
        super().__init__()
        self.config, self.tp_group = config, group
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # With this attribute, Megatron sums the gradient over ranks, each of which has that of its own tokens. The
        # gather of the outputs passes complete gradients back to each rank's tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return the output and None for the bias, like Megatron's linear layers."""
        return F.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's latent attention with replicated down-projections (`Down`)."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        group, inputs = self.pg_collection.tp, config.hidden_size
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = Down(config, inputs, config.q_lora_rank, group)
        outputs = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = Down(config, inputs, outputs, group)
