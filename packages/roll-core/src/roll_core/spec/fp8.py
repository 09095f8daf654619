"""Matrices in fp8 for weight sync: E4M3 (arXiv:2209.05433) with a scale per row.

    NAME.weight  [O, I]  -->  NAME.weight [O, I] float8_e4m3fn,  NAME.weight_scale [O, 1] float32

The trainer quantises, not the engine. A manifest therefore covers exactly the bytes that the engine uses, and half as
many bytes are sent as in bf16. Each row is quantised independently, from the trainer's value, so the bytes do not
depend on sharding or device. Names and shapes follow compressed-tensors.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from roll_core.errors import NonFiniteWeightError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

LARGEST = 448.0
"""Largest finite value of E4M3, to which a row's largest magnitude is scaled."""
SMALLEST_SCALE = 2.0**-126
"""Minimum scale for rows of zeros or nearly so. Devices may treat smaller (subnormal) numbers as 0."""
CHUNK_ELEMENTS = 16 << 20
"""Elements quantised at a time, which bounds the memory of float32 copies."""
IN_LAYERS = re.compile(r"(?:^|\.)layers\.\d+\..*\.weight$")


def is_layers_weight(name: str) -> bool:
    """True for the name of a weight in the transformer's layers, whose matrices are sent in fp8.

    False for embeddings and the output layer. Engines call this function too; their module names may differ slightly.
    """
    return IN_LAYERS.search(name) is not None


def quantise_rows(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to E4M3 `[O, I]` and float32 scales `[O, 1]`: weight ≈ E4M3 × scale, scale = max |row| / 448.

    The error is at most half the distance between neighbouring E4M3 values, times the scale. A row with NaN or infinity
    has a non-finite scale.
    """
    import torch

    found_OI = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn, device=weight_OI.device)
    scale_O1 = torch.empty(weight_OI.shape[0], 1, dtype=torch.float32, device=weight_OI.device)
    if not weight_OI.numel():
        return found_OI, scale_O1.fill_(SMALLEST_SCALE)
    num_rows = max(1, CHUNK_ELEMENTS // weight_OI.shape[1])
    for start in range(0, weight_OI.shape[0], num_rows):
        rows = slice(start, start + num_rows)
        values = weight_OI[rows].float()
        # Division, because multiplying by the reciprocal would round twice.
        scale = (values.abs().amax(1, keepdim=True) / LARGEST).clamp_min_(SMALLEST_SCALE)
        found_OI[rows] = (values / scale).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        scale_O1[rows] = scale
    return found_OI, scale_O1


def to_fp8(exported: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Convert exported tensors: layer matrices to fp8, each followed by its scales, and all others to `dtype`.

    With `dtype` None, other tensors keep their dtype. Raises `NonFiniteWeightError`, naming the tensor, and
    `UnsupportedError` if no tensor is a layer matrix. Both are raised after the export is exhausted, because it may be
    collective.
    """
    import torch

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
        raise NonFiniteWeightError(f"{wrong} has values that are NaN or infinite, which fp8 cannot represent")
    if not num_found:
        raise UnsupportedError(
            "the engine requires fp8 weights, but this model has no tensor with a name like layers.0.….weight: its"
            " architecture is not supported in fp8"
        )
