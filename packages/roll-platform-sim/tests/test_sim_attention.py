"""Attention of packed rows on simulated devices: one kernel call per layer, with the results of the CPU."""

import numpy as np
import pytest
import torch
from sim_process import on_devices
from torch.nn.attention.varlen import varlen_attn

from roll_core.data.pack import pack
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec
from roll_core.types import TrainSequence
from roll_modeling.attention import AttentionOptions, FlatLayout, attend_flat
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.models import QWEN3

HEADS, KEY_HEADS, SIZE = 4, 2, 16
LENGTHS = (5, 1, 0, 40, *[2] * 20)
FORWARD, BACKWARD = "aten::_flash_attention_forward", "aten::_flash_attention_backward"


def num_calls(trace):
    """Forward and backward calls of the kernel, and of attention for single sequences."""
    calls = {FORWARD: 0, BACKWARD: 0, "attention": 0}
    for event, number in trace.events.items():
        if event.kind == "op" and ("attention" in event.what):
            calls[event.what] = calls.get(event.what, 0) + number
    return tuple(calls.values())


def tensors(dtype):
    generator = torch.Generator().manual_seed(1)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    *qkv, grad = (torch.randn(1, each, sum(LENGTHS), SIZE, generator=generator).to(dtype) for each in heads)
    return qkv, grad.transpose(1, 2), torch.randn(HEADS, generator=generator)


def attended(device, dtype, window, sinks):
    """Output and gradients."""
    qkv, grad, sinks_H = tensors(torch.float16)
    inputs = [each.to(device, dtype).requires_grad_() for each in (*qkv, *([sinks_H] if sinks else []))]
    how = AttentionOptions(
        layout=FlatLayout(LENGTHS), scale=0.3, window=window, softcap=0.0, sinks_H=inputs[3] if sinks else None
    )
    out = attend_flat(*inputs[:3], how)
    return [each.cpu().float() for each in (out.detach(), *torch.autograd.grad(out, inputs, grad.to(device, dtype)))]


@on_devices()
def test_packed_rows_are_attended_to_as_on_the_cpu():
    from roll_platform_sim.trace import Trace

    for window in (0, 4):
        for sinks in (False, True):
            expected = attended("cpu", torch.float32, window, sinks)
            with Trace() as trace:
                found = attended("sim:0", torch.float16, window, sinks)
            assert num_calls(trace) == (1, 1, 0)
            assert trace.num("wait") == 0
            for one, other in zip(found, expected, strict=True):  # a rounding of the output to float16 in sums
                torch.testing.assert_close(one, other, rtol=2**-9, atol=2**-8)
            for one, other in zip(attended("sim:0", torch.float32, window, sinks), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@on_devices()
def test_public_function_of_torch_sees_later_keys_only_if_asked():
    (query, key, value), _, _ = tensors(torch.float16)
    query, key, value = (each[0, :, :9].transpose(0, 1).to("sim:0") for each in (query, key, value))
    bounds = torch.tensor([0, 9], dtype=torch.int32).to("sim:0")
    for window in ((-1, -1), (-1, 0), (2, 0), (1, 3)):
        found = varlen_attn(query, key, value, bounds, bounds, 9, 9, window_size=window, enable_gqa=True)
        ahead = torch.arange(9) - torch.arange(9)[:, None]
        seen = (ahead <= (window[1] if window[1] >= 0 else 9)) & (ahead >= (-window[0] if window[0] >= 0 else -9))
        q, k, v = (each.cpu().float().transpose(0, 1)[None] for each in (query, key, value))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        torch.testing.assert_close(found.cpu().float(), expected[0].transpose(0, 1), rtol=2**-9, atol=2**-9)


@on_devices()
def test_the_kernel_refuses_float32():
    query = torch.zeros(3, HEADS, SIZE, device="sim:0")
    bounds = torch.tensor([0, 3], dtype=torch.int32).to("sim:0")
    with pytest.raises(RuntimeError):
        varlen_attn(query, query, query, bounds, bounds, 3, 3)


@on_devices()
def test_a_training_step_calls_one_kernel_per_layer():
    from roll_core.algorithms.losses import sft_objective
    from roll_platform_sim.trace import Trace

    strategy = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=1e-3, num_steps=10))
    model = QWEN3 | {"vocab_size": 61}
    strategy.build(ModelSpec(random_init=model, dtype="bf16", seed=1), MeshInfo(role="student", device="sim:0"))
    layers = model["num_hidden_layers"]
    for num_rows in (2, 128):
        rows = [
            TrainSequence(id=str(i), tokens=np.arange(1, 3 + i % 5), loss_mask=np.arange(1, 3 + i % 5) > 1)
            for i in range(num_rows)
        ]
        with Trace() as trace:
            strategy.forward_backward(pack(rows), sft_objective())
        assert num_calls(trace) == (layers, layers, 0)
    strategy.close()
