"""The layer with one output of value and reward models, in place of a language model's output layer."""

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
    """Linear layer with one output, replicated on each tensor-parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel: bool = config.sequence_parallel
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        # With sequence parallelism, each rank has the gradient of its own tokens. Megatron sums it for weights with
        # this attribute.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_L1H: Tensor) -> Tensor:
        """Scores `[L]` in float32; with sequence parallelism, gathered over the tensor-parallel ranks."""
        scores_L: Tensor = F.linear(hidden_L1H[:, 0], self.weight)[:, 0].float()
        if self.sequence_parallel:  # all ranks compute the same loss, so no gradients are summed
            scores_L = gather_from_sequence_parallel_region(scores_L, tensor_parallel_output_grad=False)
        return scores_L
