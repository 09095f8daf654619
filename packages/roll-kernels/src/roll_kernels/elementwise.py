"""Compiled kernels of element-wise training operations, forward and backward (`elementwise.cpp`, by ctypes).

They are RMSNorm, gated activation, rotary embedding and log-softmax.

Tensors are contiguous, on the host, and float32 or bfloat16. Those of the log-softmax are float32.

Shapes: N rows, D their size.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roll_core.errors import ExtensionError
from roll_kernels.extensions import Extension, declare

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

HEADER = Path(__file__).with_name("kernels.h")
"""Header with bfloat16 and vectorised functions, also for kernels of other packages."""
CFLAGS = (
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-freciprocal-math",
)
"""Compiler flags. Sums may be reordered, which permits vectorisation; NaN and infinity keep their meaning."""
EXTENSION = Extension(
    name="roll_elementwise",
    sources=(Path(__file__).with_name("elementwise.cpp"),),
    headers=(HEADER,),
    cflags=CFLAGS,
    native=True,
)
DTYPES = (torch.float32, torch.bfloat16)
WEIGHT_BLOCKS = 64
"""Number of partial sums of a norm weight's gradient. Fixed, so that the result does not depend on threads."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Load the kernels, compiled on first use and cached on this machine. Raises `ExtensionError`."""
    pointer, integer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    return declare(
        EXTENSION.load(),
        {
            "roll_norm": [flag, *[pointer] * 4, integer, integer, number, flag],
            "roll_norm_backward": [flag, *[pointer] * 6, integer, integer, integer, flag],
            "roll_gate": [flag, *[pointer] * 3, integer, flag],
            "roll_gate_backward": [flag, *[pointer] * 3, integer, flag],
            "roll_rotary": [flag, *[pointer] * 4, *[integer] * 5, flag, flag],
            "roll_log_softmax": [*[pointer] * 2, integer, integer, number, flag],
            "roll_logits_gradient": [*[pointer] * 5, integer, integer, flag],
        },
    )


@lru_cache(maxsize=1)
def available() -> bool:
    """True if the kernels can be loaded. Compiles them on first use."""
    try:
        library()
    except ExtensionError as error:
        log.info("norms, gates and logprobs are computed by several operations of torch each, more slowly: %s", error)
        return False
    return True


def norm(x_ND: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """RMSNorm with the rounding of transformers, and the `[N]` float32 factors for `norm_backward`."""
    _check(x_ND, weight_D, x_ND.shape[1:])
    y_ND, scales_N = torch.empty_like(x_ND), torch.empty(len(x_ND))
    library().roll_norm(
        _low(x_ND),
        x_ND.data_ptr(),
        weight_D.data_ptr(),
        y_ND.data_ptr(),
        scales_N.data_ptr(),
        *x_ND.shape,
        epsilon,
        torch.get_num_threads(),
    )
    return y_ND, scales_N


def norm_backward(x_ND: Tensor, weight_D: Tensor, scales_N: Tensor, dy_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `norm` with respect to its input and its weight."""
    _check(x_ND, weight_D, x_ND.shape[1:])
    _check(x_ND, dy_ND, x_ND.shape)
    dx_ND, sums_BD = torch.empty_like(x_ND), torch.empty(WEIGHT_BLOCKS, x_ND.shape[1])
    library().roll_norm_backward(
        _low(x_ND),
        x_ND.data_ptr(),
        weight_D.data_ptr(),
        scales_N.data_ptr(),
        dy_ND.data_ptr(),
        dx_ND.data_ptr(),
        sums_BD.data_ptr(),
        WEIGHT_BLOCKS,
        *x_ND.shape,
        torch.get_num_threads(),
    )
    return dx_ND, sums_BD[0].to(weight_D.dtype, copy=True)  # a view would keep the memory of all blocks


def gate(gate_ND: Tensor, up_ND: Tensor) -> Tensor:
    """Gated activation, `silu(gate) * up`."""
    _check(gate_ND, up_ND, gate_ND.shape)
    y_ND = torch.empty_like(gate_ND)
    library().roll_gate(
        _low(gate_ND),
        gate_ND.data_ptr(),
        up_ND.data_ptr(),
        y_ND.data_ptr(),
        gate_ND.numel(),
        torch.get_num_threads(),
    )
    return y_ND


def gate_backward_(gate_ND: Tensor, up_ND: Tensor, dy_ND: Tensor) -> None:
    """Overwrite gate and up with their gradients. Autograd then raises if another operation saved them."""
    _check(gate_ND, up_ND, gate_ND.shape)
    _check(gate_ND, dy_ND, gate_ND.shape)
    library().roll_gate_backward(
        _low(gate_ND),
        gate_ND.data_ptr(),
        up_ND.data_ptr(),
        dy_ND.data_ptr(),
        gate_ND.numel(),
        torch.get_num_threads(),
    )
    for tensor in (gate_ND, up_ND):
        torch.autograd.graph.increment_version(tensor)


def rotary(x_HTD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, backward: bool = False) -> Tensor:
    """Rotary embedding of queries or keys; with `backward`, the input's gradient from the result's.

    `x_HTD` needs contiguous vectors only. The result is a view of a contiguous `[T, H, D]` tensor.
    """
    heads, tokens, size = x_HTD.shape
    for table in (cos_TD, sin_TD):
        _check(table, table, x_HTD.shape[1:])
    if x_HTD.stride(2) != 1 or x_HTD.dtype != cos_TD.dtype or size % 2:
        raise ValueError(f"expected contiguous vectors of even size in {cos_TD.dtype}, found {x_HTD.dtype}, {size}")
    y_THD = x_HTD.new_empty(tokens, heads, size)
    library().roll_rotary(
        _low(x_HTD),
        x_HTD.data_ptr(),
        cos_TD.data_ptr(),
        sin_TD.data_ptr(),
        y_THD.data_ptr(),
        *x_HTD.shape,
        *x_HTD.stride()[:2],
        backward,
        torch.get_num_threads(),
    )
    return y_THD.transpose(0, 1)


def log_softmax_(logits_ND: Tensor, temperature: float, *, entropy: bool) -> Tensor | None:
    """Overwrite logits with log probabilities at `temperature`; returns the `[N]` entropies if requested."""
    _check(logits_ND, logits_ND, logits_ND.shape)
    entropy_N = torch.empty(len(logits_ND)) if entropy else None
    library().roll_log_softmax(
        logits_ND.data_ptr(), _pointer(entropy_N), *logits_ND.shape, temperature, torch.get_num_threads()
    )
    return entropy_N


def logits_gradient_(
    logp_ND: Tensor, targets_N: Tensor, grad_N: Tensor, slope_N: Tensor | None, entropy_N: Tensor | None
) -> None:
    """Overwrite log probabilities with `grad * (onehot(target) - p) - slope * p * (logp + entropy)`."""
    for tensor in (grad_N, slope_N, entropy_N):
        if tensor is not None:
            _check(logp_ND, tensor, targets_N.shape)
    library().roll_logits_gradient(
        logp_ND.data_ptr(),
        targets_N.data_ptr(),
        grad_N.data_ptr(),
        _pointer(slope_N),
        _pointer(entropy_N),
        *logp_ND.shape,
        torch.get_num_threads(),
    )


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _check(first: Tensor, other: Tensor, shape: torch.Size) -> None:
    """Raise `ValueError` for an unexpected shape, dtype or layout, which kernels would read out of bounds."""
    if other.shape != shape or other.dtype != first.dtype or first.dtype not in DTYPES:
        raise ValueError(f"expected {tuple(shape)} of {first.dtype}, found {tuple(other.shape)} of {other.dtype}")
    if not (first.is_contiguous() and other.is_contiguous()):
        raise ValueError(f"expected contiguous tensors, found strides {first.stride()} and {other.stride()}")


def _low(x: Tensor) -> int:
    return int(x.dtype == torch.bfloat16)
