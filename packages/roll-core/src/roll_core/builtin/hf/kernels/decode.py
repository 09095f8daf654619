"""What a decoding step does between its matrix products, in compiled kernels: `decode.cpp`, called through ctypes.

N rows    C hidden size    H query heads    K key/value heads    D head size    I intermediate size
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roll_core.modeling.extensions import Extension

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

log = logging.getLogger(__name__)

EXTENSION = Extension(
    name="roll_decode",
    sources=(Path(__file__).with_name("decode.cpp"),),
    # Sums may be reordered, which vectorises them; NaN and infinity keep their meaning.
    cflags=(
        "-fopenmp",
        "-ffp-contract=fast",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fno-signed-zeros",
        "-fassociative-math",
        "-freciprocal-math",
    ),
    native=True,
)
DTYPES = (torch.float32, torch.bfloat16)
"""Of activations, keys and values."""


class _Attention(ctypes.Structure):
    _fields_ = (
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("epsilon", ctypes.c_float),
        ("threads", ctypes.c_int64),
    )


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Compiled on first use, once for this machine. Raises `ExtensionError`."""
    loaded = EXTENSION.load()
    pointer, integer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    for name, arguments in {
        "roll_add_norm": [flag, *[pointer] * 4, integer, integer, number, flag],
        "roll_gate": [flag, pointer, pointer, integer, integer, flag],
        "roll_attend": [flag, *[pointer] * 9, integer],
    }.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


class DecodeKernels:
    """For one model's sizes. Tensors are contiguous, on the host, and of `dtype` unless said otherwise."""

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, qk_epsilon: float, dtype: torch.dtype
    ) -> None:
        """Raises `ExtensionError` where the kernels cannot be compiled."""
        loaded = library()
        self._add_norm, self._gate, self._attend = loaded.roll_add_norm, loaded.roll_gate, loaded.roll_attend
        self._low = int(dtype == torch.bfloat16)
        self._width = num_heads * head_dim
        self._shape = _Attention(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale, epsilon=qk_epsilon
        )
        self._address = ctypes.addressof(self._shape)

    def begin(self, keys_NKWD: Tensor) -> None:
        """Before the calls of a step: how many threads compute, and how keys and values of a layer lie."""
        self._threads = torch.get_num_threads()
        self._shape.threads = self._threads
        self._shape.row_stride, self._shape.head_stride = keys_NKWD.stride(0), keys_NKWD.stride(1)

    def add_norm(self, hidden_NC: Tensor, added_NC: Tensor | None, weight_C: Tensor, epsilon: float) -> Tensor:
        """Adds onto `hidden` in place; returns its RMSNorm with the rounding of transformers."""
        out = torch.empty_like(hidden_NC)
        self._add_norm(
            self._low,
            hidden_NC.data_ptr(),
            None if added_NC is None else added_NC.data_ptr(),
            weight_C.data_ptr(),
            out.data_ptr(),
            *hidden_NC.shape,
            epsilon,
            self._threads,
        )
        return out

    def gate(self, gate_up_N2I: Tensor) -> Tensor:
        """`silu(gate) * up`, `[N, I]`."""
        num, size = gate_up_N2I.shape
        out = gate_up_N2I.new_empty(num, size // 2)
        self._gate(self._low, gate_up_N2I.data_ptr(), out.data_ptr(), num, size // 2, self._threads)
        return out

    def attend(
        self,
        qkv_NX: Tensor,
        qk_norm_HD: Tensor | None,
        cos_W1D: Tensor,
        sin_W1D: Tensor,
        keys_NKWD: Tensor,
        values_NKWD: Tensor,
        lengths_N: npt.NDArray[np.int64],
    ) -> Tensor:
        """Norms and turns queries and keys, appends keys and values to their rows at `lengths`, and attends to what
        stands there up to them: `[N, H * D]`. Tables and `qk_norm` are float32."""
        out = qkv_NX.new_empty(len(qkv_NX), self._width)
        self._attend(
            self._low,
            self._address,
            qkv_NX.data_ptr(),
            None if qk_norm_HD is None else qk_norm_HD.data_ptr(),
            cos_W1D.data_ptr(),
            sin_W1D.data_ptr(),
            keys_NKWD.data_ptr(),
            values_NKWD.data_ptr(),
            lengths_N.ctypes.data,
            out.data_ptr(),
            len(qkv_NX),
        )
        return out
