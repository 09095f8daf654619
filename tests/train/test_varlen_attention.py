"""One kernel call per layer equals one call per sequence, forwards and backwards.

torch's kernel is CUDA's: here `shared_tests.flash_operators` registers its operators for the CPU. Both sides receive
the same fp16 values, and the reference computes in float32. They differ by the rounding of results to fp16, 2^-11 of a
value, and of the output from which the backward pass sums dO · O.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from roll_core.algorithms.losses import sft_objective
from roll_core.data.pack import pack
from roll_core.spec.train import WantedOutputs
from roll_core.types import TrainSequence
from roll_modeling.attention import AttentionOptions, FlatLayout, attend_flat
from roll_modeling.varlen_attention import Sequences, varlen_kernel
from roll_strategy_hf.config import HFTrainConfig
from roll_testing.models import QWEN3
from shared_tests.flash_operators import BACKWARD, FORWARD, flash_forward, flash_operators

HEADS, KEY_HEADS = 4, 2
LENGTHS = {"ragged": (5, 1, 9, 3, 12), "one token": (1,), "empty": (4, 0, 3), "one long": (70, *[2] * 30)}


@pytest.fixture
def operators():
    varlen_kernel.cache_clear()
    with flash_operators() as calls:
        yield calls
    varlen_kernel.cache_clear()


def random_tensors(lengths, size=16, value_size=None, key_heads=KEY_HEADS):
    generator = torch.Generator().manual_seed(len(lengths))
    shapes = (HEADS, size), (key_heads, size), (key_heads, value_size or size), (HEADS, value_size or size)
    *qkv, grad = (torch.randn(1, heads, sum(lengths), d, generator=generator).half() for heads, d in shapes)
    return qkv, grad.transpose(1, 2), torch.randn(HEADS, generator=generator)


def with_gradients(qkv, grad, how, dtype):
    """Output and gradients, of sinks too if there are any."""
    inputs = [each.to(dtype).requires_grad_() for each in qkv]
    if how.sinks_H is not None:
        inputs.append(how.sinks_H.clone().requires_grad_())
        how = replace(how, sinks_H=inputs[-1])
    out = attend_flat(*inputs[:3], how)
    return [each.float() for each in (out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype)))]


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_single_call_equals_a_call_per_sequence(operators, lengths, window, sinks):
    qkv, grad, sinks_H = random_tensors(lengths)
    how = AttentionOptions(
        layout=FlatLayout(lengths), scale=0.3, window=window, softcap=0.0, sinks_H=sinks_H if sinks else None
    )
    found = with_gradients(qkv, grad, how, torch.float16)
    assert operators == [FORWARD, BACKWARD]
    for one, other in zip(found, with_gradients(qkv, grad, how, torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-9, atol=2**-9)
    assert operators == [FORWARD, BACKWARD]


@pytest.mark.parametrize(("size", "value_size"), [(20, 20), (24, 16), (16, 24)])
def test_heads_of_any_size_are_padded(operators, size, value_size):
    qkv, grad, _ = random_tensors((5, 3), size, value_size)
    how = AttentionOptions(layout=FlatLayout((5, 3)), scale=0.3, window=0, softcap=0.0)
    found = with_gradients(qkv, grad, how, torch.float16)
    assert operators == [FORWARD, BACKWARD]
    for one, other in zip(found, with_gradients(qkv, grad, how, torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-9, atol=2**-9)


def test_sinks_take_part_of_the_weight():
    # Both scores and the sink are 0: a token attends with 1/2, two tokens with 1/3 each.
    query = torch.zeros(1, 1, 2, 8)
    value = torch.tensor([3.0, 6.0]).view(1, 1, 2, 1).expand(1, 1, 2, 8)
    how = AttentionOptions(layout=FlatLayout((2,)), scale=1.0, window=0, softcap=0.0, sinks_H=torch.zeros(1))
    torch.testing.assert_close(attend_flat(query, query, value, how)[0, :, 0, 0], torch.tensor([1.5, 3.0]))


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_a_model_calls_one_kernel_per_layer(build, operators, num_rows):
    rng = np.random.default_rng(1)
    rows = [
        TrainSequence(id=str(i), tokens=rng.integers(0, 61, 3 + i % 5), loss_mask=np.arange(3 + i % 5) > 0)
        for i in range(num_rows)
    ]
    strategy = build(dtype="bf16", forward_only=True)
    operators.clear()
    found = strategy.forward(pack(rows)[0], WantedOutputs(logprobs=True)).logprobs_T
    assert operators == [FORWARD] * QWEN3["num_hidden_layers"]
    exact = build(forward_only=True).forward(pack(rows)[0], WantedOutputs(logprobs=True)).logprobs_T
    assert float((found - exact).abs().max()) < 0.2


@pytest.mark.parametrize(("recomputed", "num_forward"), [(None, 1), ("full", 2), ("selective", 1)])
def test_selective_recomputation_keeps_what_the_kernel_computed(build, operators, recomputed, num_forward):
    strategy = build(
        dtype="bf16",
        gradient_checkpointing=recomputed is not None,
        config=HFTrainConfig(recompute_granularity=recomputed),
    )
    rows = [TrainSequence(id=str(i), tokens=np.arange(5), loss_mask=np.arange(5) > 0) for i in range(3)]
    operators.clear()
    strategy.forward_backward(pack(rows), sft_objective())
    layers = QWEN3["num_hidden_layers"]
    assert (operators.count(FORWARD), operators.count(BACKWARD)) == (num_forward * layers, layers)


# -- the package flash-attn --------------------------------------------------------------------------------------------


def package_function(calls):
    """Signature of `flash_attn_varlen_func` of flash-attn 2.8, computed by the operators."""

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        calls.append({"causal": causal, "softcap": softcap, "deterministic": deterministic})
        bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        windows = {"window_size_left": window_size[0], "window_size_right": 0}
        return flash_forward(q, k, v, *bounds, dropout_p, False, False, scale=softmax_scale, **windows)[0]

    return flash_attn_varlen_func


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(capability, package)` pretends a GPU, with or without a package of that name."""

    def make(capability=(8, 0), package=None, function=None, built=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
        if package is not None:
            module = ModuleType(package)
            module.__spec__ = ModuleSpec(package, None)
            module.flash_attn_varlen_func = function
            monkeypatch.setitem(sys.modules, package, module)

    varlen_kernel.cache_clear()
    yield make
    varlen_kernel.cache_clear()


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("package", ["flash_attn", "flash_attn_interface"])
def test_an_installed_package_computes_the_same(gpu, package, window):
    calls = []
    gpu(package=package, function=package_function(calls))
    lengths = LENGTHS["ragged"]
    (query, key, value), _, _ = random_tensors(lengths)
    kernel = varlen_kernel(torch.device("cuda:0"), query.dtype, query.shape[-1])
    sequences = Sequences.of(lengths, query.device)
    rows = [each[0].transpose(0, 1) for each in (query, key, value)]
    found = kernel(*rows, sequences, sequences, scale=0.3, window=window)
    how = AttentionOptions(layout=FlatLayout(lengths), scale=0.3, window=window, softcap=0.0)
    expected = attend_flat(query.float(), key.float(), value.float(), how)[0]
    torch.testing.assert_close(found.float(), expected, rtol=2**-9, atol=2**-9)
    assert calls == [{"causal": True, "softcap": 0.0, "deterministic": False}]


CUDA = torch.device("cuda:0")


@pytest.mark.parametrize(
    ("found", "takes"),
    [
        ({}, True),
        ({"head_size": 256}, True),
        ({"head_size": 264}, False),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"device": torch.device("cpu")}, False),
        ({"softcap": True}, False),
        ({"sinks": True}, True),
    ],
)
def test_kernels_of_torch_by_input(gpu, found, takes):
    gpu()
    inputs = {"device": CUDA, "dtype": torch.bfloat16, "head_size": 128} | found
    assert (varlen_kernel(**inputs) is not None) is takes


@pytest.mark.parametrize(
    ("device", "head_size", "takes"),
    [
        ({"capability": (7, 5)}, 128, False),
        ({"capability": (8, 9)}, 192, True),
        ({"capability": (8, 9)}, 256, False),
        ({"capability": (9, 0)}, 256, True),
        ({"built": False}, 128, False),
    ],
)
def test_kernels_of_torch_by_device(gpu, device, head_size, takes):
    gpu(**device)
    assert (varlen_kernel(CUDA, torch.bfloat16, head_size) is not None) is takes


def test_the_package_serves_softcaps_and_torch_serves_sinks(gpu):
    calls = []
    gpu(package="flash_attn", function=package_function(calls))
    query = torch.zeros(3, HEADS, 8, dtype=torch.float16)
    sequences = Sequences.of((3,), query.device)
    varlen_kernel(CUDA, query.dtype, 8, softcap=True)(
        query, query, query, sequences, sequences, scale=1.0, window=0, softcap=5.0
    )
    assert calls == [{"causal": True, "softcap": 5.0, "deterministic": False}]
    with flash_operators() as operators:
        varlen_kernel(CUDA, query.dtype, 8, sinks=True)(
            query, query, query, sequences, sequences, scale=1.0, window=0, sinks_H=torch.zeros(HEADS)
        )
    assert (operators, len(calls)) == ([FORWARD], 1)
    assert varlen_kernel(CUDA, query.dtype, 8, softcap=True, sinks=True) is None


# -- devices without a kernel for the dtype ----------------------------------------------------------------------------


def test_key_heads_are_repeated_on_devices(monkeypatch):
    # torch has a fused kernel for float32 only with as many key heads as query heads.
    grouped = []
    usual = F.scaled_dot_product_attention

    def attend(*qkv, enable_gqa=False, **named):
        grouped.append(enable_gqa)
        return usual(*qkv, enable_gqa=enable_gqa, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    query = torch.empty(1, HEADS, 9, 8, device="meta")
    how = AttentionOptions(layout=FlatLayout((5, 4)), scale=0.3, window=0, softcap=0.0)
    out = attend_flat(query, query[:, :KEY_HEADS], query[:, :KEY_HEADS], how)
    assert (out.shape, grouped) == ((1, 9, HEADS, 8), [False, False])
