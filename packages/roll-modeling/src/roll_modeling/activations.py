"""Activations of a module by name, for comparing trainer and engine layer by layer.

A point is the output of a module, `model.layers.0.mlp.down_proj`, or the input of a linear layer,
`model.layers.0.mlp.down_proj:input`. L tokens, W width of the activation.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn


@contextmanager
def visited(model: nn.Module, visit: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """During the context, the tensor at each point is replaced by `visit(name, tensor)`, in the order of the forward
    pass."""

    def before(name: str) -> Any:
        return lambda _, args: (visit(f"{name}:input", args[0]), *args[1:]) if args else None

    def after(name: str) -> Any:
        return lambda _, args, output: visit(name, output) if isinstance(output, torch.Tensor) else None

    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_pre_hook(before(name)))
        hooks.append(module.register_forward_hook(after(name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yields the activations `[L, W]` of the last forward pass within the context, as float32 on the host."""
    activations: dict[str, Tensor] = {}

    def record(name: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.ndim > 1:
            rows = tensor.flatten(2).flatten(0, 1) if tensor.ndim > 2 else tensor  # [N, L, heads, size] of q_norm
            activations[name] = rows.detach().to("cpu", torch.float32, copy=True)
        return tensor

    with visited(model, record):
        yield activations
