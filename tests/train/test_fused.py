"""Faster modules give the numbers and gradients of those that they replace, and replace nothing else."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, apply_rotary_pos_emb

from roll_kernels import elementwise, fused
from roll_strategy_hf.config import HFTrainConfig
from roll_testing.errors import raises_error


def norm(size=24):
    made = Qwen3RMSNorm(size, eps=1e-5)
    nn.init.normal_(made.weight)
    return made


def mlp(activation="silu", size=24):
    return Qwen3MLP(Qwen3Config(hidden_size=size, intermediate_size=40, hidden_act=activation))


@pytest.mark.parametrize("make", [norm, mlp])
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 50, 24), (2, 7, 3, 24), (0, 24)])
def test_values_and_gradients_are_the_modules_own(make, shape):
    torch.manual_seed(0)
    module = make()
    x, upstream = torch.randn(shape, requires_grad=True), torch.randn(shape)
    wanted = [x, *module.parameters()]
    plain = module(x)
    expected = torch.autograd.grad(plain, wanted, upstream)
    assert fused.fuse(module) == 1
    assert "forward" in vars(module)
    found = module(x)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    for each, other in zip(torch.autograd.grad(found, wanted, upstream), expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)


def plain_norm(x_ND, weight_D):
    return x_ND * (x_ND.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt() * weight_D


def plain_gate(gate_ND, up_ND):
    return gate_ND / (1 + torch.exp(-gate_ND)) * up_ND


def functions(name):
    """A fused operation, and the same by its formula."""
    if name == "norm":
        return lambda x, weight: fused._RMSNorm.apply(x, weight, 1e-5), plain_norm
    return fused._SwiGLU.apply, plain_gate


@pytest.mark.parametrize("name", ["norm", "gate"])
@pytest.mark.parametrize("size", [17, 64, 100])
@pytest.mark.parametrize("num_rows", [1, 65, 3001])
@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 4e-6), (torch.bfloat16, 2**-6)])
def test_values_and_gradients_are_those_of_float64(name, size, num_rows, dtype, digits):
    torch.manual_seed(0)
    first, upstream = (3 * torch.randn(num_rows, size).to(dtype) for _ in range(2))
    second = torch.randn(size if name == "norm" else (num_rows, size)).to(dtype)
    given = [each.requires_grad_() for each in (first, second)]
    exact = [each.detach().double().requires_grad_() for each in given]
    fast, plain = functions(name)
    found, expected = fast(*given), plain(*exact)
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(found, given, upstream),
        torch.autograd.grad(expected, exact, upstream.double()),
        strict=True,
    )
    for each, other in pairs:
        assert each.dtype is dtype
        assert (each.double() - other).abs().max() <= digits * other.abs().max()


def test_a_norm_in_bfloat16_rounds_as_transformers_does():
    torch.manual_seed(0)
    module, x = norm(256).bfloat16(), torch.randn(500, 256).bfloat16()
    plain = module(x)
    assert fused.fuse(module) == 1
    found = module(x)
    assert (found == plain).float().mean() > 0.999
    torch.testing.assert_close(found, plain, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_gates_keep_torchs_code_without_a_compiler(monkeypatch, dtype):
    monkeypatch.setattr(elementwise, "available", lambda: False)
    assert fused.fuse(norm().to(dtype)) == fused.fuse(mlp().to(dtype)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "tokens", "size"), [(1, 1, 2), (4, 33, 16), (8, 300, 64)])
@pytest.mark.parametrize("layout", ["tokens first", "heads first", "strided"])
def test_rotary_embeddings_are_those_of_transformers(dtype, heads, tokens, size, layout):
    torch.manual_seed(0)
    x, upstream = (torch.randn(1, heads, tokens, size).to(dtype) for _ in range(2))
    if layout == "tokens first":
        x, upstream = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (x, upstream))
    elif layout == "strided":
        x, upstream = (torch.stack((each, each), dim=-1)[..., 0] for each in (x, upstream))
    x.requires_grad_()
    cos, sin = torch.randn(2, 1, tokens, size).to(dtype)  # halves that differ: the gradient is the transposed map
    plain, _ = apply_rotary_pos_emb(x, x, cos, sin)
    found = fused._Rotary.apply(x, cos[0], sin[0])
    digits = {torch.float32: 4e-6, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(found, plain, rtol=digits, atol=digits)
    (grad,), (expected,) = (torch.autograd.grad(each, x, upstream) for each in (found, plain))
    torch.testing.assert_close(grad, expected, rtol=digits, atol=4 * digits)


def test_attention_uses_fast_rotary_with_equal_results(build, monkeypatch):
    fast, plain = build().model, build(config=HFTrainConfig(fused=False)).model
    plain.load_state_dict(fast.state_dict())
    calls = []
    monkeypatch.setattr(elementwise, "rotary", lambda *a, own=elementwise.rotary, **k: calls.append(1) or own(*a, **k))
    batch = torch.arange(3, 9)[None]
    assert fast.config.num_hidden_layers == 2
    for implementation in ("eager", "sdpa"):
        for each in (fast, plain):
            each.set_attn_implementation(implementation)
        torch.testing.assert_close(fast(batch).logits, plain(batch).logits, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2 * 2 * 2  # implementations, layers, queries and keys
    two = batch.repeat(2, 1)  # several rows: transformers' own function
    torch.testing.assert_close(fast(two).logits, plain(two).logits, rtol=1e-4, atol=1e-5)
    assert len(calls) == 8


def test_attention_fills_a_cache_passed_by_its_old_name(build):
    model = build().model
    model.set_attn_implementation("eager")
    attention, cache = model.model.layers[0].self_attn, DynamicCache(config=model.config)
    assert "forward" in vars(attention)
    hidden = torch.randn(1, 3, model.config.hidden_size)
    tables = model.model.rotary_emb(hidden, torch.arange(3)[None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, from 5.24 on
        attention(hidden, position_embeddings=tables, attention_mask=None, past_key_values=cache)
    assert cache.get_seq_length() == 3


class Projected(nn.Module):
    """Attention of a model with its own code, whose `forward` calls its base class's."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x, cos, sin):
        return apply_rotary_pos_emb(x, x, cos, sin)[0]


class Doubled(Projected):
    def forward(self, x, cos, sin):
        return super().forward(x, cos, sin) + apply_rotary_pos_emb(x, x, cos, sin)[1]


def test_attention_that_calls_its_base_class_keeps_its_results():
    module, (x, cos, sin) = Doubled(), torch.randn(3, 1, 5, 8)
    plain = module(x[None], cos, sin)
    assert fused.fuse(nn.Sequential(module)) == 1
    torch.testing.assert_close(module(x[None], cos, sin), plain)


def test_fused_norm_of_another_dtype_than_its_input_is_exact():
    module, x = norm(), torch.randn(3, 24).bfloat16()
    plain = module(x)
    assert fused.fuse(module) == 1
    assert torch.equal(module(x), plain)


def test_the_number_of_threads_changes_no_bit():
    x, weight, upstream = torch.randn(5000, 64), torch.randn(64), torch.randn(5000, 64)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            y, scales = elementwise.norm(x, weight, 1e-5)
            found.append([y, *elementwise.norm_backward(x, weight, scales, upstream)])
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_non_finite_inputs_stay_non_finite():
    x = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0], [1.0, 2.0]])
    for found in (fused._RMSNorm.apply(x, torch.ones(2), 1e-5), fused._SwiGLU.apply(x, torch.ones(3, 2))):
        assert not found[:2].isfinite().all(dim=1).any()
        assert found[2].isfinite().all()


@pytest.mark.parametrize("weight", [torch.ones(0), torch.ones(23), torch.ones(24).double(), torch.ones(48)[::2]])
def test_memory_of_another_shape_is_never_read(weight):
    with raises_error(ValueError, "expected"):
        elementwise.norm(torch.ones(3, 24), weight, 1e-5)


def test_inputs_that_are_not_contiguous_are_understood():
    module = norm()
    x = torch.randn(24, 5).T.requires_grad_()
    plain = module(x)
    (expected,) = torch.autograd.grad(plain.square().sum(), x)
    fused.fuse(module)
    (found,) = torch.autograd.grad(module(x).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", [Gemma2RMSNorm(24), mlp("gelu"), nn.LayerNorm(24), norm().double()], ids=str)
def test_modules_with_other_formulas_are_not_fused(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    assert fused.fuse(module) == 0
    assert "forward" not in vars(module)


def test_fusing_can_be_disabled(build):
    replaced = [each for each in build().model.modules() if "forward" in vars(each)]
    assert len(replaced) == 2 * (5 + 1) + 1  # norms and gates of two layers, their attention, the last norm
    assert not any("forward" in vars(each) for each in build(config=HFTrainConfig(fused=False)).model.modules())
