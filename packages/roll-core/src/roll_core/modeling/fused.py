"""Norms, gated activation and linear layers with few passes over memory, in place of transformers' own modules.

On a CPU the element-wise work of a layer costs as much as a third of its GEMMs, because every operation goes through
memory: here each works on blocks of rows that stay in a core's cache, and keeps nothing that is cheap to compute again.
A module is replaced only if, tried on numbers, the replacement gives what the module itself gives.

Shapes: N rows, D their size; T flat tokens, H heads, I intermediate size.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roll_core.modeling.products import Linear, prefers_onednn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Replacement = tuple[int, Callable[[Tensor], Tensor]]
    """Size of the input, and what is to be called instead."""

log = logging.getLogger(__name__)

BLOCK_ELEMENTS = 1 << 16
"""Of one operand: 256 KiB in float32, so that four of them fit a core's second-level cache."""


def fuse(model: nn.Module) -> int:
    """Replace what can be replaced in a float32 model on the host; returns the number of modules."""
    parameter = next(model.parameters())
    if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
        return 0
    return sum(_replace(module) for module in model.modules())


@torch.no_grad()
def _replace(module: Any) -> bool:
    replacement = _rms_norm_of(module) or _gated_mlp_of(module) or _linear_of(module)
    if replacement is None or "forward" in vars(module):
        return False
    size, forward = replacement
    probe = torch.linspace(-3.0, 3.0, 3 * size).view(1, 3, size)
    expected, found = module(probe), forward(probe)
    if not torch.allclose(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()) + 1e-12):
        return False
    module.forward = forward
    return True


def _rms_norm_of(module: Any) -> Replacement | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = type(module).__name__.endswith("RMSNorm")
    if not named or not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(epsilon, float):
        return None

    def forward(hidden_states: Tensor) -> Tensor:
        found: Tensor = _RMSNorm.apply(hidden_states, module.weight, epsilon)  # type: ignore[no-untyped-call]
        return found

    return len(weight), forward


def _gated_mlp_of(module: Any) -> Replacement | None:
    names = {name for name, _ in module.named_children()}
    if not {"gate_proj", "up_proj", "down_proj"} <= names <= {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    if not all(hasattr(each, "in_features") for each in (gate, up, down)):  # linear, with an adapter or without
        return None

    def forward(x: Tensor) -> Tensor:
        gated: Tensor = _SwiGLU.apply(gate(x), up(x))  # type: ignore[no-untyped-call]
        found: Tensor = down(gated)
        return found

    return gate.in_features, forward


def _linear_of(module: Any) -> Replacement | None:
    if type(module) is not nn.Linear or not prefers_onednn(module.weight):
        return None

    def forward(x: Tensor) -> Tensor:
        found: Tensor = Linear.apply(x, module.weight, module.bias)  # type: ignore[no-untyped-call]
        return found

    return module.in_features, forward


def _blocks(num_rows: int, size: int) -> Iterator[slice]:
    step = max(1, BLOCK_ELEMENTS // size)
    return (slice(start, start + step) for start in range(0, num_rows, step))


class _RMSNorm(torch.autograd.Function):
    """`y = w * x * r` with `r = 1 / sqrt(mean(x²) + eps)`.

    With n = x * r: dw = sum(dy * n), dx = r * (dy * w - n * mean(dy * w * n)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        size = x.shape[-1]
        x_ND = x.reshape(-1, size)
        y_ND = torch.empty_like(x_ND)
        scale_N1 = x_ND.new_empty(len(x_ND), 1)
        for rows in _blocks(len(x_ND), size):
            x_BD, y_BD, scale_B1 = x_ND[rows], y_ND[rows], scale_N1[rows]
            torch.linalg.vector_norm(x_BD, dim=-1, keepdim=True, out=scale_B1)
            scale_B1.square_().div_(size).add_(epsilon).rsqrt_()
            torch.mul(x_BD, scale_B1, out=y_BD).mul_(weight_D)
        ctx.save_for_backward(x_ND, weight_D, scale_N1)
        return y_ND.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_D, scale_N1 = ctx.saved_tensors
        size = x_ND.shape[-1]
        dy_ND = grads[0].reshape(-1, size)
        dx_ND = torch.empty_like(x_ND)
        dw_D = torch.zeros_like(weight_D)
        step = max(1, BLOCK_ELEMENTS // size)
        normal, product = x_ND.new_empty(step, size), x_ND.new_empty(step, size)
        for rows in _blocks(len(x_ND), size):
            dy_BD, dx_BD, scale_B1 = dy_ND[rows], dx_ND[rows], scale_N1[rows]
            n_BD = torch.mul(x_ND[rows], scale_B1, out=normal[: len(dy_BD)])
            dyn_BD = torch.mul(dy_BD, n_BD, out=product[: len(dy_BD)])
            dw_D += dyn_BD.sum(dim=0)
            mean_B1 = torch.mv(dyn_BD, weight_D).div_(size)[:, None]
            torch.mul(dy_BD, weight_D, out=dx_BD)
            dx_BD.addcmul_(n_BD, mean_B1, value=-1.0).mul_(scale_B1)
        return dx_ND.view(grads[0].shape), dw_D, None


class _SwiGLU(torch.autograd.Function):
    """`y = silu(gate) * up`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        size = gate.shape[-1]
        gate_NI, up_NI = gate.reshape(-1, size), up.reshape(-1, size)
        y_NI = torch.empty_like(gate_NI)
        for rows in _blocks(len(gate_NI), size):
            torch.ops.aten.silu.out(gate_NI[rows], out=y_NI[rows]).mul_(up_NI[rows])
        ctx.save_for_backward(gate_NI, up_NI)
        return y_NI.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_NI, up_NI = ctx.saved_tensors
        shape, size = grads[0].shape, gate_NI.shape[-1]
        dy_NI = grads[0].reshape(-1, size)
        dgate_NI, dup_NI = torch.empty_like(gate_NI), torch.empty_like(up_NI)
        scratch = gate_NI.new_empty(max(1, BLOCK_ELEMENTS // size), size)
        for rows in _blocks(len(gate_NI), size):
            gate_BI, dy_BI = gate_NI[rows], dy_NI[rows]
            torch.ops.aten.silu.out(gate_BI, out=dup_NI[rows]).mul_(dy_BI)
            dsilu_BI = torch.mul(dy_BI, up_NI[rows], out=scratch[: len(dy_BI)])
            torch.ops.aten.silu_backward.grad_input(dsilu_BI, gate_BI, grad_input=dgate_NI[rows])
        return dgate_NI.view(shape), dup_NI.view(shape)
