"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1) in Megatron's layers, with gradients that are whole.

    hidden --down--> latent [+ rotated key, one for all heads] --norm, up--> heads of this rank

Megatron cuts the two small matrices that go down over tensor parallel ranks and gathers what they give. On the way back
each rank then has the gradient of its own heads for the key that all heads share, and nothing adds these up. Here each
rank holds the small matrices whole, as Megatron does with Transformer Engine, and has them compute its own tokens.
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
    """A layer that every tensor parallel rank holds whole, and feeds with its tokens."""

    def __init__(self, config: Any, inputs: int, outputs: int, group: Any) -> None:
        super().__init__()
        self.config, self.tp_group = config, group
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Each rank has the gradient of its tokens: Megatron adds up those of such weights. What it gathers of the
        # tokens' outputs brings their whole gradients back.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Like Megatron's layers: the output, and a bias that is not there."""
        return F.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """With `Down` for what goes down."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        group, inputs = self.pg_collection.tp, config.hidden_size
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = Down(config, inputs, config.q_lora_rank, group)
        outputs = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = Down(config, inputs, outputs, group)
