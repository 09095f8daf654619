"""Replacements of transformers' modules with few passes over memory.

They are norms, gated activations, rotary embeddings and linear layers.

On a CPU a layer's element-wise work costs up to a third of its GEMMs, because every operation goes through memory.
Compiled kernels do it in one pass (`elementwise`). Cheap intermediate results are recomputed instead of kept. Without a
C++ compiler, only linear layers are replaced. A module is replaced only if a trial shows that the replacement gives the
module's own results.

Shapes: N rows, D their size; T flat tokens, H heads, I intermediate size.
"""

from __future__ import annotations

import logging
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roll_kernels import elementwise
from roll_kernels.products import ONEDNN_MIN_PRODUCTS, Linear, prefers_onednn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Replacement = tuple[int, Callable[[Tensor], Tensor]]
    """Size of the input, and the function that replaces the module's `forward`."""

log = logging.getLogger(__name__)

TOLERANCES = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (2**-7, 2**-9)}
"""Relative tolerance, and absolute tolerance as a share of the largest value: a few roundings."""
ROTARY = "apply_rotary_pos_emb"
"""Name of the rotary embedding's function in transformers' model files."""
CACHE_BEFORE_5_24 = "past_key_values"
"""Parameter of a `forward` that took the cache before transformers 5.24."""
RENAMING = "transformers.utils.deprecation"
"""Module of the wrapper with which a `forward` also takes arguments by the names of older transformers."""
LEAST_WEIGHTS = 1 << 12
"""Minimum number of weight elements of a replaced linear layer: it is faster for microbatches of a thousand tokens."""


def fuse(model: nn.Module) -> int:
    """Replace modules of a model on the host. bfloat16 requires compiled kernels.

    Returns the number of replaced modules.
    """
    parameter = next(model.parameters())
    compiled = parameter.device.type == "cpu" and elementwise.available()
    dtypes = elementwise.DTYPES if compiled else (torch.float32,)
    if parameter.device.type != "cpu" or parameter.dtype not in dtypes:
        return 0
    dtype = parameter.dtype
    return sum(
        _replace(module, dtype, compiled) or (compiled and _replace_rotary(module, dtype)) for module in model.modules()
    )


@torch.no_grad()
def _replace(module: Any, model_dtype: torch.dtype, compiled: bool) -> bool:
    replacement = (compiled and (_rms_norm_of(module) or _gated_mlp_of(module))) or _linear_of(module)
    if replacement is None or "forward" in vars(module):
        return False
    size, forward = replacement
    dtype = _dtype_of(module, model_dtype)
    relative, absolute = TOLERANCES.get(dtype, (0.0, 0.0))
    probe = torch.linspace(-3.0, 3.0, 3 * size).view(1, 3, size).to(dtype)
    expected, result = module(probe), forward(probe)
    largest = float(expected.abs().max())
    if not torch.allclose(result, expected, rtol=relative, atol=absolute * largest + 1e-12):
        return False
    module.forward = forward
    return True


@torch.no_grad()
def _replace_rotary(module: Any, model_dtype: torch.dtype) -> bool:
    """Replace the function that an attention module's `forward` calls for its rotary embedding, in this module only."""
    forward = wrapped = type(module).forward
    while getattr(forward, "__globals__", {}).get("__name__") == RENAMING:
        forward = forward.__wrapped__
    plain = getattr(forward, "__globals__", {}).get(ROTARY)
    code = getattr(forward, "__code__", None)
    if plain is None or code is None or ROTARY not in code.co_names or "forward" in vars(module):
        return False

    def rotary(*inputs: Any, **named: Any) -> Any:
        if named or len(inputs) != 4:
            return plain(*inputs, **named)
        q, k, cos, sin = inputs
        shape = (1, q.shape[-2], q.shape[-1])
        same = q.dtype == k.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape == shape
        if not same or q.shape[0] != 1 or q.shape[-2:] != k.shape[-2:]:
            return plain(*inputs)
        tables = cos[0].contiguous(), sin[0].contiguous()
        return _Rotary.apply(q, *tables), _Rotary.apply(k, *tables)  # type: ignore[no-untyped-call]

    dtype = _dtype_of(module, model_dtype)
    q, k, cos, sin = torch.linspace(-3.0, 3.0, 4 * 3 * 16).view(4, 1, 1, 3, 16).to(dtype)
    try:
        expected = plain(q, k, cos[0], sin[0])
    except (TypeError, ValueError, RuntimeError):  # another signature
        return False
    for rotated, other in zip(rotary(q, k, cos[0], sin[0]), expected, strict=True):
        if not torch.allclose(rotated, other, rtol=TOLERANCES[dtype][0], atol=9 * TOLERANCES[dtype][1]):
            return False
    own_globals = {**forward.__globals__, ROTARY: rotary}
    replaced = FunctionType(code, own_globals, forward.__name__, forward.__defaults__, forward.__closure__)
    replaced.__kwdefaults__ = forward.__kwdefaults__

    def renamed(self: Any, *args: Any, **named: Any) -> Any:
        return (wrapped if CACHE_BEFORE_5_24 in named else replaced)(self, *args, **named)

    module.forward = MethodType(replaced if forward is wrapped else renamed, module)
    return True


def _dtype_of(module: nn.Module, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of a module's inputs: that of its first parameter, or of the model if this parameter is quantized."""
    dtype = next(module.parameters()).dtype
    return dtype if dtype.is_floating_point else model_dtype


def _rms_norm_of(module: Any) -> Replacement | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = type(module).__name__.endswith("RMSNorm")
    if not named or not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(epsilon, float):
        return None

    module_forward = module.forward

    def forward(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != module.weight.dtype:  # a float32 norm between bfloat16 layers
            return module_forward(hidden_states)  # type: ignore[no-any-return]
        result: Tensor = _RMSNorm.apply(hidden_states, module.weight, epsilon)  # type: ignore[no-untyped-call]
        return result

    return len(weight), forward


def _gated_mlp_of(module: Any) -> Replacement | None:
    names = {name for name, _ in module.named_children()}
    if not {"gate_proj", "up_proj", "down_proj"} <= names <= {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    if not all(hasattr(layer, "in_features") for layer in (gate, up, down)):  # linear, with or without an adapter
        return None

    def forward(x: Tensor) -> Tensor:
        gated: Tensor = _SwiGLU.apply(gate(x), up(x))  # type: ignore[no-untyped-call]
        result: Tensor = down(gated)
        return result

    return gate.in_features, forward


def _linear_of(module: Any) -> Replacement | None:
    if type(module) is not nn.Linear or not prefers_onednn(module.weight, ONEDNN_MIN_PRODUCTS // LEAST_WEIGHTS):
        return None

    def forward(x: Tensor) -> Tensor:
        result: Tensor = Linear.apply(x, module.weight, module.bias)  # type: ignore[no-untyped-call]
        return result

    return module.in_features, forward


class _RMSNorm(torch.autograd.Function):
    """`y = w * x * r` with `r = 1 / sqrt(mean(x²) + eps)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        x_ND = x.reshape(-1, x.shape[-1]).contiguous()
        y_ND, scales_N = elementwise.norm(x_ND, weight_D, epsilon)
        ctx.save_for_backward(x_ND, weight_D, scales_N)
        return y_ND.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_D, scales_N = ctx.saved_tensors
        dy_ND = grads[0].reshape(x_ND.shape).contiguous()
        dx_ND, dw_D = elementwise.norm_backward(x_ND, weight_D, scales_N, dy_ND)
        return dx_ND.view(grads[0].shape), dw_D, None


class _Rotary(torch.autograd.Function):
    """`y = x * cos + (-second half of x, first half of x) * sin`, for queries or keys `[1, H, T, D]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return elementwise.rotary(_vectors(x), cos_TD, sin_TD)[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return elementwise.rotary(_vectors(grads[0]), *ctx.saved_tensors, backward=True)[None], None, None


def _vectors(x: Tensor) -> Tensor:
    return x[0] if x.stride(-1) == 1 else x[0].contiguous()


class _SwiGLU(torch.autograd.Function):
    """`y = silu(gate) * up`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        size = gate.shape[-1]
        gate_NI, up_NI = gate.reshape(-1, size).contiguous(), up.reshape(-1, size).contiguous()
        ctx.save_for_backward(gate_NI, up_NI)
        return elementwise.gate(gate_NI, up_NI).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_NI, up_NI = ctx.saved_tensors
        dy_NI = grads[0].reshape(gate_NI.shape).contiguous()
        elementwise.gate_backward_(gate_NI, up_NI, dy_NI)
        return gate_NI.view(grads[0].shape), up_NI.view(grads[0].shape)
