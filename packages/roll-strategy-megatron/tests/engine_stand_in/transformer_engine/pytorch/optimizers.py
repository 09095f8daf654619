"""AdamW that counts steps by group, and what goes over many tensors at once."""

import torch
from fused_adam import FusedAdam

__all__ = [
    "FusedAdam",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
]


class FusedSGD(torch.optim.SGD):
    """Nothing here asks for it."""


def multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *arguments):
    return op(noop_flag_buffer, tensor_lists, *arguments)


def multi_tensor_l2norm(noop_flag_buffer, tensor_lists, per_parameter):
    assert not per_parameter
    squares = [each.float().pow(2).sum() for each in tensor_lists[0]]
    return torch.stack(squares).sum().sqrt(), None


def multi_tensor_scale(noop_flag_buffer, tensor_lists, scale):
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


multi_tensor_scale_tensor = multi_tensor_scale
"""The same of a tensor."""
