"""Linear projections of the engine, each with the fastest kernel that this PyTorch build offers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from roll_modeling.memory import padded_rows
from roll_modeling.products import HAS_ONEDNN, ONEDNN_MIN_WEIGHTS, onednn_linear, prefers_onednn

if TYPE_CHECKING:
    from torch import Tensor

_PACKS = HAS_ONEDNN and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class Projection:
    """Linear layer `x @ weight.T + bias`.

    For float32 on a CPU PyTorch calls MKL, but oneDNN is faster on non-Intel processors. oneDNN is faster still with
    weights packed into its own layout. `benchmarks/rollout.py` measures the three as `linear`, `onednn` and `packed`.
    A packed weight is a copy: create a new `Projection` after the weight has changed.
    """

    __slots__ = ("_bias", "_onednn", "_weight", "weight")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, pack: bool, num_rows: int = 64) -> None:
        self.weight = weight_OI
        self._bias = bias_O
        large = weight_OI.device.type == "cpu" and weight_OI.numel() >= ONEDNN_MIN_WEIGHTS
        packed = _PACKS and pack and large and weight_OI.dtype in (torch.float32, torch.bfloat16)
        self._onednn = packed or prefers_onednn(weight_OI)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI, num_rows) if packed else weight_OI

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Apply the layer: `[T, I]` to `[T, O]`."""
        if self._onednn:
            num_rows = len(x_TI)
            if more := padded_rows(num_rows) - num_rows:
                x_TI = F.pad(x_TI, (0, 0, 0, more))
            return onednn_linear(x_TI, self._weight, self._bias)[:num_rows]
        return F.linear(x_TI, self._weight, self._bias)
