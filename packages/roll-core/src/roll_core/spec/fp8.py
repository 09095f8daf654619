"""Matrices in fp8 for weight sync: E4M3 (arXiv:2209.05433) with float32 scales, in one of two formats.

    fp8            NAME.weight [O, I]  -->  NAME.weight [O, I] E4M3,  NAME.weight_scale [O, 1]
    fp8_per_block  NAME.weight [O, I]  -->  NAME.weight [O, I] E4M3,  NAME.weight_scale_inv [⌈O/128⌉, ⌈I/128⌉]
                   experts.NAME [E, O, I]  -->  experts.NAME [E, O, I] E4M3,
                                                experts.NAME_scale_inv [E, ⌈O/128⌉, ⌈I/128⌉]

The trainer quantises, not the engine. A manifest therefore covers exactly the bytes that the engine uses, and half as
many bytes are sent as in bf16. Each row or block is quantised independently, from the trainer's value, so the bytes do
not depend on sharding or device. Names and shapes of `fp8` follow compressed-tensors. Those of `fp8_per_block` follow
the checkpoints of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) and Qwen3-FP8. Despite its name, `weight_scale_inv` is
multiplied with the E4M3 values, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from roll_core.errors import NonFiniteWeightError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from roll_core.spec.config import WeightFormat

LARGEST = 448.0
"""Largest finite value of E4M3, to which the largest magnitude of a row or block is scaled."""
SMALLEST_SCALE = 2.0**-126
"""Minimum scale for rows and blocks of zeros or nearly so. Devices may treat smaller (subnormal) numbers as 0."""
BLOCK = 128
"""Rows and columns of a block of `fp8_per_block`. Blocks at the lower and right edge may be smaller."""
CHUNK_ELEMENTS = 16 << 20
"""Elements quantised at a time, which bounds the memory of float32 copies."""
IN_LAYERS = re.compile(r"(?:^|\.)layers\.\d+\..*\.weight$")
ROUTERS = re.compile(r"\.(?:gate|router|router\.layer|shared_expert_gate)\.weight$")
EXPERTS = re.compile(r"(?:^|\.)layers\.\d+\..*\.experts\.(?:gate_up_proj|down_proj)$")


def is_layers_weight(name: str) -> bool:
    """True for the name of a weight in the transformer's layers, whose matrices are sent in fp8.

    False for embeddings, the output layer, and routers and gates of experts, which DeepSeek and Qwen keep out of fp8,
    too. Engines call this function too; their module names may differ slightly.
    """
    return IN_LAYERS.search(name) is not None and ROUTERS.search(name) is None


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


def quantise_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise blocks of 128 × 128 to E4M3 `[..., O, I]` and float32 scales `[..., ⌈O/128⌉, ⌈I/128⌉]`.

    weight ≈ E4M3 × scale, scale = max |block| / 448. The error is that of `quantise_rows`. A block with NaN or infinity
    has a non-finite scale.
    """
    import torch
    from torch.nn.functional import pad

    *outer, rows, columns = weight.shape
    grid = -(-rows // BLOCK), -(-columns // BLOCK)
    quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.full((*outer, *grid), SMALLEST_SCALE, dtype=torch.float32, device=weight.device)
    if not weight.numel():
        return quantised, scale
    num_blocks = max(1, CHUNK_ELEMENTS // (BLOCK * columns))
    matrices = weight.reshape(-1, rows, columns), quantised.view(-1, rows, columns), scale.view(-1, *grid)
    for weight_OI, found_OI, scale_NM in zip(*matrices, strict=True):
        for start in range(0, scale_NM.shape[0], num_blocks):
            part = slice(start * BLOCK, (start + num_blocks) * BLOCK)
            values = weight_OI[part].float()
            height, width = values.shape
            padded = pad(values, (0, -width % BLOCK, 0, -height % BLOCK))
            blocks = padded.view(-1, BLOCK, grid[1], BLOCK)  # [N, 128, M, 128]
            found_scale = (blocks.abs().amax((1, 3), keepdim=True) / LARGEST).clamp_min_(SMALLEST_SCALE)
            rounded = (blocks / found_scale).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
            found_OI[part] = rounded.flatten(2).flatten(0, 1)[:height, :width]
            scale_NM[start : start + num_blocks] = found_scale[:, 0, :, 0]
    return quantised, scale


def to_fp8(
    exported: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None, weight_format: WeightFormat = "fp8"
) -> Iterator[tuple[str, Tensor]]:
    """Convert exported tensors: layer matrices to fp8, each followed by its scales, and all others to `dtype`.

    `weight_format` is `fp8` or `fp8_per_block`; only the latter converts experts. With `dtype` None, other tensors keep
    their dtype. Raises `NonFiniteWeightError`, naming the tensor, and `UnsupportedError` if no tensor is a layer
    matrix. Both are raised after the export is exhausted, because it may be collective.
    """
    import torch

    per_block = weight_format == "fp8_per_block"
    quantise, suffix = (quantise_blocks, "_scale_inv") if per_block else (quantise_rows, "_scale")
    num_found, wrong = 0, ""
    for name, tensor in exported:
        tensor = tensor.detach()
        if wrong:
            continue
        is_matrix = tensor.ndim == 2 and is_layers_weight(name)
        is_matrix |= per_block and tensor.ndim == 3 and EXPERTS.search(name) is not None
        if not (is_matrix and tensor.is_floating_point()):
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            continue
        num_found += 1
        weight, scale = quantise(tensor)
        if not torch.isfinite(scale).all():
            wrong = name
            continue
        yield name, weight
        yield f"{name}{suffix}", scale
    if wrong:
        raise NonFiniteWeightError(f"{wrong} has values that are NaN or infinite, which fp8 cannot represent")
    if not num_found:
        raise UnsupportedError(
            "the engine requires fp8 weights, but this model has no tensor with a name like layers.0.….weight: its"
            " architecture is not supported in fp8"
        )
