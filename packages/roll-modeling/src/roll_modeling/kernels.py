"""Operations that roll-kernels computes faster on a host. Without that package, torch computes the same results.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor, nn

try:
    from roll_kernels import blocked_attention, decode, elementwise, products
    from roll_kernels.fused import fuse
    from roll_kernels.products import input_gradient, linear, prefers_onednn, weight_gradient
except ModuleNotFoundError as error:
    if error.name != "roll_kernels":
        raise
    blocked_attention = decode = elementwise = products = None  # type: ignore[assignment]

    def fuse(model: nn.Module) -> int:
        """Replace no module."""
        return 0

    def prefers_onednn(weight_OI: Tensor, num_rows: int | None = None) -> bool:
        """False: torch chooses the library of its products."""
        return False

    def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Compute `x @ weight.T + bias`, `[N, O]`."""
        return F.linear(x_NI, weight_OI, bias_O)

    def input_gradient(grad_NO: Tensor, weight_OI: Tensor) -> Tensor:
        """Input gradient of `linear`, `[N, I]`."""
        return grad_NO @ weight_OI

    def weight_gradient(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
        """Weight gradient of `linear`, `[O, I]`."""
        return grad_NO.T @ x_NI


__all__ = [
    "blocked_attention",
    "decode",
    "elementwise",
    "fuse",
    "input_gradient",
    "linear",
    "prefers_onednn",
    "products",
    "weight_gradient",
]
