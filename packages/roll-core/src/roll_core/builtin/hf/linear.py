"""The engine's matrix products: for each weight the fastest kernel that this build of torch has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

ONEDNN_MIN_WEIGHTS = 60_000
"""Below, a call of oneDNN costs more than its better kernel gains (measured at 16 to 128 rows)."""
_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class Projection:
    """`x @ weight.T + bias`.

    For float32 on a CPU torch itself calls MKL, which on processors that are not Intel's reaches 60 to 80 % of oneDNN.
    oneDNN is faster still on weights that it has laid out for itself: 109 against 88 (plain) and 83 GFLOP/s (MKL) for
    64 × 3072 × 512 on one Zen 4 core, 62 against 27 and 25 for 2 rows; in bfloat16 212 against 167. That is a copy,
    which does not follow the weight: make a new `Projection` when the weight has changed.
    """

    __slots__ = ("_bias", "_onednn", "_weight", "weight")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, pack: bool, num_rows: int = 64) -> None:
        self.weight = weight_OI
        self._bias = bias_O
        large = _ONEDNN and weight_OI.device.type == "cpu" and weight_OI.numel() >= ONEDNN_MIN_WEIGHTS
        packed = pack and large and weight_OI.dtype in (torch.float32, torch.bfloat16)
        self._onednn = packed or (large and weight_OI.dtype is torch.float32)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI, num_rows) if packed else weight_OI

    def __call__(self, x_TI: Tensor) -> Tensor:
        """`[T, I]` to `[T, O]`."""
        if self._onednn:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self._weight, self._bias, "none", [], "")
            return result
        return F.linear(x_TI, self._weight, self._bias)
