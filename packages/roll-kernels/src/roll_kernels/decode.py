"""Compiled kernels for the operations of a decoding step between its matrix products, called through ctypes.

`decode.cpp` has the kernels for CPUs, `decode.cu` those for NVIDIA GPUs.

N rows    C hidden size    H query heads    K key/value heads    D head size    I intermediate size    W positions
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roll_core.errors import ExtensionError
from roll_kernels.elementwise import CFLAGS, DTYPES, HEADER
from roll_kernels.extensions import Extension, declare

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CUDA_EXTENSION", "DTYPES", "EXTENSION", "DecodeKernels", "cuda_library", "functions", "library"]

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
    """CPU kernels, compiled on first use and cached per machine. Raises `ExtensionError` if compilation fails."""
    return declare(EXTENSION.load(), functions(cuda=False))


@lru_cache(maxsize=1)
def cuda_library() -> ctypes.CDLL:
    """CUDA kernels, compiled on first use for this machine's GPUs and cached. Raises `ExtensionError` on failure."""
    return declare(CUDA_EXTENSION.load(), functions(cuda=True), result=ctypes.c_int)


def functions(*, cuda: bool) -> dict[str, list[Any]]:
    """Argument types by function name.

    CPU functions take the number of threads last, except `roll_attend`, which reads it from its struct. CUDA functions
    take a stream last and return 0 or a CUDA error code.
    """
    pointer, integer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    last = pointer if cuda else flag
    return {
        "roll_add_norm": [flag, *[pointer] * 4, integer, integer, number, last],
        "roll_gate": [flag, *[pointer] * 2, integer, integer, last],
        "roll_attend": [flag, *[pointer] * 9, integer, *([pointer] if cuda else [])],
    }


def current_stream(device: torch.device) -> int | None:
    """CUDA handle of PyTorch's current stream on the device."""
    stream: int = torch.get_device_module(device).current_stream(device).cuda_stream
    return stream


class DecodeKernels:
    """Decoding kernels for the sizes of one model.

    Tensors are on `device`, contiguous and of `dtype` unless stated otherwise.
    """

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
        """Load the kernels. Raises `ExtensionError` if they cannot be compiled.

        `scale` multiplies attention scores; `qk_epsilon` is the epsilon of the query and key norms.
        """
        self._device = device
        loaded = library() if device.type == "cpu" else cuda_library()
        self._add_norm, self._gate, self._attend = loaded.roll_add_norm, loaded.roll_gate, loaded.roll_attend
        self._low = int(dtype == torch.bfloat16)
        self._width = num_heads * head_dim
        self._shape = _Attention(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale, epsilon=qk_epsilon
        )
        self._address = ctypes.addressof(self._shape)

    def begin(self, keys_NKWD: Tensor, lengths_N: Tensor) -> None:
        """Prepare a decoding step: set cache strides, row lengths, and the thread count or CUDA stream.

        `keys_NKWD` are the keys of any layer; all layers have the same strides. `lengths_N` are the numbers of cached
        positions of each row, int64.
        """
        self._shape.row_stride, self._shape.head_stride = keys_NKWD.stride(0), keys_NKWD.stride(1)
        self._lengths_N = lengths_N
        if self._device.type == "cpu":
            self._queue: int | None = torch.get_num_threads()
            self._shape.threads = self._queue
            self._attend_queue: tuple[int | None, ...] = ()
        else:
            # The runtime launches on the thread's current device, and refuses the stream of another one.
            torch.accelerator.set_device_index(self._device.index or 0)
            self._queue = current_stream(self._device)
            self._attend_queue = (self._queue,)

    def add_norm(self, hidden_NC: Tensor, added_NC: Tensor | None, weight_C: Tensor, epsilon: float) -> Tensor:
        """Add `added_NC` to `hidden_NC` in place and return the RMSNorm `[N, C]`, with the rounding of transformers."""
        out = torch.empty_like(hidden_NC)
        failed = self._add_norm(
            self._low,
            hidden_NC.data_ptr(),
            None if added_NC is None else added_NC.data_ptr(),
            weight_C.data_ptr(),
            out.data_ptr(),
            *hidden_NC.shape,
            epsilon,
            self._queue,
        )
        if failed:
            raise _failure("roll_add_norm", failed)
        return out

    def gate(self, gate_up_N2I: Tensor) -> Tensor:
        """`silu(gate) * up` as `[N, I]`, from `[N, 2 * I]` with the gates first."""
        num, size = gate_up_N2I.shape
        out = gate_up_N2I.new_empty(num, size // 2)
        failed = self._gate(self._low, gate_up_N2I.data_ptr(), out.data_ptr(), num, size // 2, self._queue)
        if failed:
            raise _failure("roll_gate", failed)
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
        """Attention of one decoding step: `[N, H * D]`.

        Norms and rotates (RoPE) queries and keys. Writes keys and values into the cache at the positions `lengths_N` of
        `begin`, and attends to all positions up to and including these. Rotary tables and `qk_norm_HD` are float32.
        Rows after the last length are padding: their results are 0.
        """
        num = len(self._lengths_N)
        out = qkv_NX.new_empty(len(qkv_NX), self._width)
        out[num:].zero_()
        failed = self._attend(
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
            num,
            *self._attend_queue,
        )
        if failed:
            raise _failure("roll_attend", failed)
        return out


def _failure(name: str, code: int) -> ExtensionError:
    return ExtensionError(f"{name} failed with CUDA error {code}; set strategy_config.kernels to auto")
