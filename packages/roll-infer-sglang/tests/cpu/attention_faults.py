"""Faults of SGLang's attention, by the name that a file has: `roll-core doctor mismatch` names each."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from standin import change

FILE = "SGLANG_TEST_ATTENTION"
"""Environment variable with the path of the file."""


def install():
    """In this process, from now on, if tests ask for faults."""
    if FILE in os.environ:
        change("sglang.srt.layers.attention.torch_native_backend", _break)


def _break(module):
    backend = module.TorchNativeAttnBackend
    backend.forward_extend = _faulty(backend.forward_extend)
    backend.forward_decode = _faulty(backend.forward_decode)


def _faulty(forward):
    def with_fault(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        fault = Path(os.environ[FILE]).read_text(encoding="utf-8")
        if fault in ("float8_e4m3fn", "bfloat16"):
            k, v = (tensor.to(getattr(torch, fault)).to(tensor.dtype) for tensor in (k, v))
        scaling, window = layer.scaling, layer.sliding_window_size
        layer.scaling = 1.4 * scaling if fault == "scale" else scaling
        layer.sliding_window_size = 11 if fault == "window" else window
        try:
            return forward(self, q, k, v, layer, forward_batch, save_kv_cache)
        finally:
            layer.scaling, layer.sliding_window_size = scaling, window

    return with_fault
