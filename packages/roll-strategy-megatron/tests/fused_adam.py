"""Stands for the optimizers of Transformer Engine and Apex, which Megatron takes where they are installed: it counts
steps by group and keeps nothing but moments of a parameter, as `fused_adam.py` of Transformer Engine 2 does."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import torch


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, eps, weight_decay, adam_w_mode, capturable=False):
        assert adam_w_mode
        assert not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (first, second), step = group["betas"], group["step"]
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(each), torch.zeros_like(each)
                state["exp_avg"].lerp_(each.grad, 1 - first)
                state["exp_avg_sq"].lerp_(each.grad**2, 1 - second)
                each.mul_(1 - group["lr"] * group["weight_decay"])
                root = (state["exp_avg_sq"] / (1 - second**step)).sqrt() + group["eps"]
                each.sub_(group["lr"] / (1 - first**step) * state["exp_avg"] / root)


def with_fused_adam(rank, function, *arguments):
    """`function` on this rank, where Megatron has found it."""
    with ExitStack() as stack:
        for place in ("megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer"):
            stack.enter_context(patch(f"{place}.Adam", FusedAdam))
        stack.enter_context(patch("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False))
        return function(rank, *arguments)
