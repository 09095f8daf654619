"""What a decoding step does between its matrix products, in compiled kernels, called through ctypes: `decode.cpp` on a
processor, `decode.cu` on a GPU of NVIDIA.

N rows    C hidden size    H query heads    K key/value heads    D head size    I intermediate size
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roll_core.errors import ExtensionError
from roll_core.native.extensions import Extension, declare
from roll_modeling.elementwise import CFLAGS, HEADER

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

log = logging.getLogger(__name__)

EXTENSION = Extension(
    name="roll_decode",
    sources=(Path(__file__).with_name("decode.cpp"),),
    headers=(HEADER,),
    cflags=CFLAGS,
    native=True,
)
CUDA_EXTENSION = Extension(
    name="roll_decode_cuda", sources=(Path(__file__).with_name("decode.cu"),), cuda_cflags=("-O3", "-std=c++17")
)


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
    """For processors. Compiled on first use, once for this machine. Raises `ExtensionError`."""
    return declare(EXTENSION.load(), functions(cuda=False))


@lru_cache(maxsize=1)
def cuda_library() -> ctypes.CDLL:
    """For GPUs. Compiled on first use, once for this machine's GPUs. Raises `ExtensionError`."""
    return declare(CUDA_EXTENSION.load(), functions(cuda=True), result=ctypes.c_int)


def functions(*, cuda: bool) -> dict[str, list[Any]]:
    """Argument types by function. On a GPU each takes a stream at the end, and returns 0 or the number of an error."""
    pointer, integer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    last = pointer if cuda else flag
    return {
        "roll_add_norm": [flag, *[pointer] * 4, integer, integer, number, last],
        "roll_gate": [flag, *[pointer] * 2, integer, integer, last],
        "roll_attend": [flag, *[pointer] * 9, integer, *([pointer] if cuda else [])],
    }


def current_stream(device: torch.device) -> int | None:
    """CUDA's own name of the stream on which torch queues now."""
    stream: int = torch.get_device_module(device).current_stream(device).cuda_stream
    return stream


class DecodeKernels:
    """For one model's sizes. Tensors are contiguous, on the device, and of `dtype` unless said otherwise."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        qk_epsilon: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises `ExtensionError` where the kernels cannot be compiled."""
        self._device = device
        loaded = library() if device.type == "cpu" else cuda_library()
        self._add_norm, self._gate, self._attend = loaded.roll_add_norm, loaded.roll_gate, loaded.roll_attend
        self._low = int(dtype == torch.bfloat16)
        self._width = num_heads * head_dim
        self._shape = _Attention(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale, epsilon=qk_epsilon
        )
        self._address = ctypes.addressof(self._shape)

    def begin(self, keys_NKWD: Tensor, lengths_N: npt.NDArray[np.int64]) -> None:
        """Before the calls of a step: how keys and values of a layer lie, how many each row has, and what computes."""
        self._shape.row_stride, self._shape.head_stride = keys_NKWD.stride(0), keys_NKWD.stride(1)
        self._lengths_N = torch.from_numpy(lengths_N).to(keys_NKWD.device)
        if self._device.type == "cpu":
            self._queue: int | None = torch.get_num_threads()
            self._shape.threads = self._queue
            self._attend_queue: tuple[int | None, ...] = ()
        else:
            self._queue = current_stream(self._device)
            self._attend_queue = (self._queue,)

    def add_norm(self, hidden_NC: Tensor, added_NC: Tensor | None, weight_C: Tensor, epsilon: float) -> Tensor:
        """Adds onto `hidden` in place; returns its RMSNorm with the rounding of transformers."""
        out = torch.empty_like(hidden_NC)
        refused = self._add_norm(
            self._low,
            hidden_NC.data_ptr(),
            None if added_NC is None else added_NC.data_ptr(),
            weight_C.data_ptr(),
            out.data_ptr(),
            *hidden_NC.shape,
            epsilon,
            self._queue,
        )
        if refused:
            raise _refusal("roll_add_norm", refused)
        return out

    def gate(self, gate_up_N2I: Tensor) -> Tensor:
        """`silu(gate) * up`, `[N, I]`."""
        num, size = gate_up_N2I.shape
        out = gate_up_N2I.new_empty(num, size // 2)
        refused = self._gate(self._low, gate_up_N2I.data_ptr(), out.data_ptr(), num, size // 2, self._queue)
        if refused:
            raise _refusal("roll_gate", refused)
        return out

    def attend(
        self,
        qkv_NX: Tensor,
        qk_norm_HD: Tensor | None,
        cos_W1D: Tensor,
        sin_W1D: Tensor,
        keys_NKWD: Tensor,
        values_NKWD: Tensor,
    ) -> Tensor:
        """Norms and turns queries and keys, appends keys and values to their rows at the `lengths` of `begin`, and
        attends to what stands there up to them: `[N, H * D]`. Tables and `qk_norm` are float32."""
        out = qkv_NX.new_empty(len(qkv_NX), self._width)
        refused = self._attend(
            self._low,
            self._address,
            qkv_NX.data_ptr(),
            None if qk_norm_HD is None else qk_norm_HD.data_ptr(),
            cos_W1D.data_ptr(),
            sin_W1D.data_ptr(),
            keys_NKWD.data_ptr(),
            values_NKWD.data_ptr(),
            self._lengths_N.data_ptr(),
            out.data_ptr(),
            len(qkv_NX),
            *self._attend_queue,
        )
        if refused:
            raise _refusal("roll_attend", refused)
        return out


def _refusal(name: str, code: int) -> ExtensionError:
    return ExtensionError(f"{name}: CUDA refused it with error {code}; set strategy_config.kernels to auto")
