"""Workarounds for DeepSpeed 0.19. A test per workaround fails once it is no longer needed."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch

from roll_modeling.optimizer import clip_factor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def quiet_collectives() -> None:
    """Suppress the deprecation warning of torch 2.13 for the names of collectives that DeepSpeed uses."""
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def build_nothing_at_start() -> None:
    """Prevent DeepSpeed from compiling operators. Call before DeepSpeed initializes the process group.

    On CPU, DeepSpeed compiles an inference operator when it first initializes a process group. That takes half a
    minute, needs a compiler, and leaves a lock if the process is killed meanwhile. Detecting compatible operators also
    runs the compiler several times. ROLL calls none of DeepSpeed's operators, so the list of compatible ones is set to
    empty.
    """
    import deepspeed

    # DeepSpeed computes the list when this name is first read.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})


def make_moments_known(engine: Any) -> None:
    """Stages 1 and 2: register the moments by parameter, which DeepSpeed otherwise does only after the first step.

    Without it, a state that is read or written before the first step has no moments.
    """
    engine.optimizer._lazy_init_hp_params_optimizer_state()


@torch.no_grad()
def undo_first_step(
    optimizer: torch.optim.Optimizer, parameters: Mapping[int, Tensor], masters: Mapping[int, Tensor]
) -> None:
    """Stage 0 in 16 bit: undo the step with gradients of 0 by which DeepSpeed allocates the moments.

    It counts in Adam's bias correction, and decays the master weights. `parameters` and `masters` have the same keys.
    """
    for key, master in masters.items():
        optimizer.state[master]["step"].zero_()
        master.copy_(parameters[key])


def add_norm_and_clipping(engine: Any, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Stage 0 in float32: compute the gradient norm and clip the reduced gradients by a pre-step hook on `optimizer`.

    DeepSpeed uses torch's optimizer directly there, without either.
    If the norm is not finite, the hook drops the gradients, so that the step changes nothing. It stores the result in
    the attributes that the engine reads of DeepSpeed's own optimizers.
    """
    state: Any = optimizer

    def before_step(*_: object) -> None:
        grads = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        norm = float(_norm(grads))  # the host waits for the device once
        state._global_grad_norm = norm
        state.overflow = not math.isfinite(norm)
        if state.overflow:
            engine.zero_grad()
            return
        factor = clip_factor(norm, max_norm)
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)

    state.overflow = False
    optimizer.register_step_pre_hook(before_step)


def _norm(grads: list[Tensor]) -> Tensor:
    if not grads:
        return torch.zeros(())
    return torch.stack(torch._foreach_norm(grads, 2)).double().square().sum().sqrt()
