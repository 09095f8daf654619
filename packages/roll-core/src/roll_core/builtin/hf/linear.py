"""The GEMM of the engine: the fastest that this build of torch has for plain, unpacked weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

ONEDNN_MIN_WEIGHTS = 100_000
"""Below, a call costs more than the better kernel gains (measured at 64 and 128 rows)."""


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    For float32 on a CPU torch calls MKL, whose kernels reach 60 to 80 % of oneDNN's on processors that are not Intel's
    (137 against 183 GFLOP/s at 64 × 2816 × 512 on two Zen 4 cores, 110 against 176 with a vocabulary of 32k).
    """
    if (
        x_TI.dtype is torch.float32
        and weight_OI.numel() >= ONEDNN_MIN_WEIGHTS
        and x_TI.device.type == "cpu"
        and x_TI.shape[0] > 1
        and _HAS_ONEDNN
    ):
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
        return result
    return F.linear(x_TI, weight_OI, bias_O)


_HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")
