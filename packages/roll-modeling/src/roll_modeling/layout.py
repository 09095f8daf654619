"""Memory layout of projections: layers that read the same input are adjacent in one buffer.

The engine multiplies by query, key and value weights (and by gate and up) in one GEMM. If the trainer's parameters are
adjacent, the fused matrix is a view of them. Weights published in the same process are then used without a copy: the
engine sees every optimizer step at once.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that read the same input, in the order of their rows in the buffer."""


def make_adjacent(model: nn.Module) -> int:
    """Move the parameters of `model` so that siblings are adjacent slices of one buffer; returns the number of groups.

    Call it right after loading, before an optimizer or a wrapper holds the parameters. Parameters keep their identity,
    shape, values and gradient flags. Groups that cannot be joined (different dtypes, tied or quantised weights, a bias
    on only some) are unchanged.
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    joined = 0
    for module in model.modules():
        for names in SIBLINGS:
            linears = [getattr(module, name, None) for name in names]
            if not all(type(linear) is torch.nn.Linear for linear in linears):
                continue
            for kind in ("weight", "bias"):
                parameters = [getattr(linear, kind) for linear in linears]
                if all(
                    isinstance(parameter, torch.nn.Parameter) and owners[id(parameter)] == 1 for parameter in parameters
                ):
                    joined += _join(parameters)
    return joined


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """View of `tensors` stacked along their first dimension; None if they are not adjacent in memory."""
    first = tensors[0].detach()
    end = first.storage_offset()
    for tensor in tensors:
        if (
            tensor.dtype != first.dtype
            or tensor.device != first.device
            or tensor.shape[1:] != first.shape[1:]
            or not tensor.is_contiguous()
            or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or tensor.storage_offset() != end
        ):
            return None
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _join(parameters: list[torch.nn.Parameter]) -> bool:
    first = parameters[0]
    if any(
        parameter.dtype != first.dtype
        or parameter.device != first.device
        or parameter.shape[1:] != first.shape[1:]
        or parameter.is_meta
        for parameter in parameters
    ):
        return False
    if adjacent(parameters) is not None:
        return True
    with torch.no_grad():
        buffer = torch.cat([parameter.detach() for parameter in parameters])
        start = 0
        for parameter in parameters:
            parameter.data = buffer[start : start + parameter.shape[0]]
            start += parameter.shape[0]
    return True
