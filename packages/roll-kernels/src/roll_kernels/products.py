"""Matrix products with float32 weights on a CPU, with the faster of torch's two libraries (MKL, oneDNN).

torch itself calls MKL, which is slower than oneDNN on non-Intel processors (measured by `benchmarks/products.py`).
oneDNN accepts transposed operands, so input gradients gain as much. Weight gradients gain less.

Shapes: N rows, I inputs, O outputs. Of these only `Linear` is differentiable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

ONEDNN_MIN_WEIGHTS = 60_000
"""Minimum number of weight elements for which oneDNN is faster with any number of rows."""
ONEDNN_MIN_PRODUCTS = 1 << 22
"""Minimum number of multiplications (rows × inputs × outputs) for which oneDNN is faster despite its call overhead."""
HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch._C._has_mkldnn


def prefers_onednn(weight_OI: Tensor, num_rows: int | None = None) -> bool:
    """True if oneDNN is faster for products of `num_rows` rows with this weight; None means any number of rows."""
    if not HAS_ONEDNN or type(weight_OI) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if weight_OI.dtype is not torch.float32 or weight_OI.device.type != "cpu":
        return False
    size = weight_OI.numel()
    return size >= ONEDNN_MIN_WEIGHTS or (num_rows is not None and num_rows * size >= ONEDNN_MIN_PRODUCTS)


def onednn_linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute `x @ weight.T + bias`, `[N, O]`, with oneDNN. `weight` may be in oneDNN's own layout."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")
    return result


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute `x @ weight.T + bias`, `[N, O]`."""
    if prefers_onednn(weight_OI, len(x_NI)):
        return onednn_linear(x_NI, weight_OI, bias_O)
    return F.linear(x_NI, weight_OI, bias_O)


def input_gradient(grad_NO: Tensor, weight_OI: Tensor) -> Tensor:
    """Input gradient of `linear`: `grad @ weight`, `[N, I]`."""
    if prefers_onednn(weight_OI, len(grad_NO)):
        return onednn_linear(grad_NO, weight_OI.t())
    return grad_NO @ weight_OI


def weight_gradient(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """Weight gradient of `linear`: `grad.T @ x`, `[O, I]`."""
    products = len(x_NI) * x_NI.shape[1] * grad_NO.shape[1]
    if not (products >= ONEDNN_MIN_PRODUCTS and prefers_onednn(x_NI, len(x_NI)) and grad_NO.dtype is x_NI.dtype):
        return grad_NO.T @ x_NI
    if grad_NO.shape[1] <= x_NI.shape[1]:  # faster with the wider operand as the weight
        return onednn_linear(grad_NO.t(), x_NI.t())
    return onednn_linear(x_NI.t(), grad_NO.t()).t()


class Linear(torch.autograd.Function):
    """Differentiable `linear`; `x` may have any leading dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        ctx.save_for_backward(x, weight_OI)
        product = linear(x.reshape(-1, x.shape[-1]), weight_OI, bias_O)
        # As torch's own linear: autograd refuses changes in place of a custom function's view (Gemma 3n adds to one).
        result: Tensor = torch.ops.aten._unsafe_view(product, [*x.shape[:-1], len(weight_OI)])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients that autograd needs."""
        x, weight_OI = ctx.saved_tensors
        grad_NO = grads[0].reshape(-1, len(weight_OI))
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = input_gradient(grad_NO, weight_OI).view(x.shape) if wants_x else None
        grad_weight_OI = weight_gradient(grad_NO, x.reshape(-1, x.shape[-1])) if wants_weight else None
        return grad_x, grad_weight_OI, grad_NO.sum(dim=0) if wants_bias else None
