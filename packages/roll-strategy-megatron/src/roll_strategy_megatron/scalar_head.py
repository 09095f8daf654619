"""The layer with one output of models that give values or scores, where language models have their output layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import nn

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor


class ScalarHead(nn.Module):
    """Held whole by each tensor parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel: bool = config.sequence_parallel
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        # With sequence parallel each rank has the gradient of its tokens: Megatron adds up those of such weights.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_L1H: Tensor) -> Tensor:
        """`[L]`, in float32, of all the tokens that tensor parallel ranks share."""
        scores_L: Tensor = F.linear(hidden_L1H[:, 0], self.weight)[:, 0].float()
        if self.sequence_parallel:  # all ranks compute the same loss of all, so a rank's gradient is that of its part
            scores_L = gather_from_sequence_parallel_region(scores_L, tensor_parallel_output_grad=False)
        return scores_L
