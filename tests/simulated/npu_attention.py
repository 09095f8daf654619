"""Attention of packed rows on an NPU whose torch-npu is a stand-in, and on the CPU: run in an empty folder.

Writes `results.json`: the largest difference of outputs and gradients by window, and the calls of the kernel.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch_npu  # type: ignore[import-not-found]

from roll_modeling.attention import AttentionOptions, FlatLayout, attend_flat

HEADS, KEY_HEADS, SIZE = 4, 2, 24
LENGTHS = (5, 1, 0, 40, *[2] * 20)
num_calls = 0


def counted(*arguments: object, **named: object) -> object:
    """The stand-in's kernel."""
    global num_calls
    num_calls += 1
    return kernel(*arguments, **named)


def attended(device: str, dtype: torch.dtype, window: int) -> list[torch.Tensor]:
    """Output and gradients."""
    generator = torch.Generator().manual_seed(1)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    *qkv, grad = (torch.randn(1, num, sum(LENGTHS), SIZE, generator=generator).half() for num in heads)
    inputs = [each.to(device, dtype).requires_grad_() for each in qkv]
    how = AttentionOptions(layout=FlatLayout(LENGTHS), scale=0.3, window=window, softcap=0.0, sinks_H=None)
    out = attend_flat(*inputs, how)
    gradients = torch.autograd.grad(out, inputs, grad.transpose(1, 2).to(device, dtype))
    return [each.detach().cpu().float() for each in (out, *gradients)]


if __name__ == "__main__":
    kernel, torch_npu.npu_fusion_attention = torch_npu.npu_fusion_attention, counted
    found = {}
    for window in (0, 4):
        expected = attended("cpu", torch.float32, window)
        pairs = zip(attended("npu:0", torch.float16, window), expected, strict=True)
        found[window] = max(float((one - other).abs().max()) for one, other in pairs)
    results = {"differences": found, "num_calls": num_calls}
    Path("results.json").write_text(json.dumps(results), encoding="utf-8")
    os._exit(0)  # Python 3.11 may abort while autograd's thread of a device ends
