"""Matrices in 8 bits on their way to an engine: E4M3 (arXiv:2209.05433), with a scale per row.

    NAME.weight  [O, I]  -->  NAME.weight [O, I] float8_e4m3fn,  NAME.weight_scale [O, 1] float32

The trainer quantises, not the engine: so a manifest covers the very bytes with which the engine computes, and half of
bf16's travel. A row is rounded by itself, from the value that the trainer has, so the bytes are the same however a
model is spread and whatever the device. Names and shapes are those of compressed-tensors.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from roll_core.errors import NonFiniteWeightError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

LARGEST = 448.0
"""Of E4M3: a row's largest magnitude becomes this."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of rows that are all zeros or nearly, 2⁻¹²⁶: a smaller number would be subnormal, which devices may take for 0."""
CHUNK_ELEMENTS = 16 << 20
"""Rounded at a time, which bounds what the passage through float32 takes."""
IN_LAYERS = re.compile(r"(?:^|\.)layers\.\d+\..*\.weight$")


def is_layers_weight(name: str) -> bool:
    """Whether a matrix of this name belongs to one of the transformer's layers, which is what travels in 8 bits;
    embeddings and the output layer do not. For engines too, whose modules may be called a little otherwise."""
    return IN_LAYERS.search(name) is not None


def quantise_rows(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 `[O, I]` and the scales `[O, 1]`, float32: weight ≈ E4M3 × scale, scale = max |row| / 448.

    The error is at most half the distance of neighbours in E4M3, times the scale. Rows that have an infinity or NaN
    have a scale that is not finite.
    """
    found_OI = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn, device=weight_OI.device)
    scale_O1 = torch.empty(weight_OI.shape[0], 1, dtype=torch.float32, device=weight_OI.device)
    if not weight_OI.numel():
        return found_OI, scale_O1.fill_(SMALLEST_SCALE)
    num_rows = max(1, CHUNK_ELEMENTS // weight_OI.shape[1])
    for start in range(0, weight_OI.shape[0], num_rows):
        rows = slice(start, start + num_rows)
        values = weight_OI[rows].float()
        # By division: a product with the reciprocal would be rounded twice.
        scale = (values.abs().amax(1, keepdim=True) / LARGEST).clamp_min_(SMALLEST_SCALE)
        found_OI[rows] = (values / scale).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        scale_O1[rows] = scale
    return found_OI, scale_O1


def in_eight_bits(exported: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """The exported tensors with matrices of layers in 8 bits, each followed by its scales, and the others in `dtype`,
    or their own where that is None.

    Raises `NonFiniteWeightError`, which names the tensor, and `UnsupportedError` where no tensor is such a matrix. Both
    after the export has come to its end: other ranks may be in it.
    """
    num_found, wrong = 0, ""
    for name, tensor in exported:
        tensor = tensor.detach()
        if wrong:
            continue
        if not (tensor.ndim == 2 and tensor.is_floating_point() and is_layers_weight(name)):
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            continue
        num_found += 1
        weight, scale = quantise_rows(tensor)
        if not torch.isfinite(scale).all():
            wrong = name
            continue
        yield name, weight
        yield f"{name}_scale", scale
    if wrong:
        raise NonFiniteWeightError(f"{wrong} has values that are NaN or infinite, which 8 bits would not show")
    if not num_found:
        raise UnsupportedError(
            "the engine asks for weights in 8 bits, but no tensor of this model has a name like"
            " layers.0.….weight: its architecture is not supported in 8 bits"
        )
