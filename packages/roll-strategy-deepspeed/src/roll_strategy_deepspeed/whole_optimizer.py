"""Stage 0 in float32, where DeepSpeed uses torch's optimizer directly: gradient norm, clipping and skipped steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roll_modeling.optimizer import clip_factor

if TYPE_CHECKING:
    from torch import Tensor


def guard(engine: Any, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Install a pre-step hook on `optimizer` that computes the gradient norm and clips the reduced gradients.

    If the norm is not finite, the hook drops the gradients, so that the step changes nothing. It stores the result in
    the attributes that the engine reads of DeepSpeed's own optimizers.
    """
    state: Any = optimizer

    def before_step(*_: object) -> None:
        grads = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        norm = _norm(grads)
        state._global_grad_norm = norm
        state.overflow = not bool(torch.isfinite(norm))
        if state.overflow:
            engine.zero_grad()
            return
        factor = clip_factor(float(norm), max_norm)
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)

    state.overflow = False
    optimizer.register_step_pre_hook(before_step)


def _norm(grads: list[Tensor]) -> Tensor:
    if not grads:
        return torch.zeros(())
    return torch.stack(torch._foreach_norm(grads, 2)).double().square().sum().sqrt()
