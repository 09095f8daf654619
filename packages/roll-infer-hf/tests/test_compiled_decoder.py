"""The kernels of a decoding step: against torch's operators, and where they cannot be had."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.errors import ExtensionError, UnsupportedError
from roll_infer_hf.compiled_decoder import CompiledDecoder, decoder_class
from roll_infer_hf.decoder import Decoder, Projection
from roll_infer_hf.runner import CachedPrompt, PromptChunk
from roll_kernels import decode
from roll_kernels.decode import DecodeKernels
from roll_kernels.products import HAS_ONEDNN
from roll_modeling.model import load_model
from roll_testing.errors import raises_error

DTYPES = [torch.float32, torch.bfloat16]
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""Relative: of sums in another order, and of one rounding more or less."""


def kernels(dtype=torch.float32, *, heads=4, kv_heads=2, size=16, epsilon=1e-6):
    made = DecodeKernels(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        scale=size**-0.5,
        qk_epsilon=epsilon,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    made.begin(torch.empty(1, kv_heads, 1, size), torch.zeros(1, dtype=torch.int64))
    return made


def near(found, expected):
    return torch.allclose(found.float(), expected.float(), rtol=BOUND[found.dtype], atol=BOUND[found.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num", "size"), [(1, 1), (3, 33), (64, 512)])
def test_the_norm_adds_first_and_rounds_where_transformers_does(dtype, num, size):
    torch.manual_seed(num)
    hidden, added = torch.randn(2, num, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    total = hidden + added
    normal = total.float() * torch.rsqrt(total.float().square().mean(-1, keepdim=True) + 1e-5)
    found = kernels(dtype).add_norm(hidden, added, weight, 1e-5)
    assert torch.equal(hidden, total)
    assert near(found, weight * normal.to(dtype))
    assert torch.equal(kernels(dtype).add_norm(hidden, None, weight, 1e-5), found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_is_silu_everywhere(dtype):
    gate = torch.cat([torch.linspace(-120, 120, 997), torch.tensor([0.0, -0.0, 1e-30])]).to(dtype)
    up = torch.linspace(-2, 2, 1000).to(dtype)
    found = kernels(dtype).gate(torch.cat([gate, up]).unsqueeze(0))
    assert near(found[0], F.silu(gate) * up)


@settings(max_examples=60)
@given(
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 4),
    size=st.sampled_from([2, 8, 18, 32, 64, 128]),
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    normed=st.booleans(),
    seed=st.integers(0, 100),
)
def test_attention_is_that_of_torch_over_each_rows_own_positions(kv_heads, groups, size, lengths, normed, seed):
    torch.manual_seed(seed)
    num, heads, width = len(lengths), kv_heads * groups, max(lengths) + 3
    qkv = torch.randn(num, heads + 2 * kv_heads, size)
    keys, values = torch.randn(num, kv_heads, width, size), torch.randn(num, kv_heads, width, size)
    for cache in (keys, values):
        for row, length in enumerate(lengths):
            cache[row, :, length:] = torch.nan  # nobody reads what lies beyond
    cos, sin = torch.randn(width, 1, size), torch.randn(width, 1, size)
    weight = torch.randn(heads + kv_heads, size) if normed else None
    made = kernels(heads=heads, kv_heads=kv_heads, size=size)
    made.begin(keys, torch.tensor(lengths))
    found = made.attend(qkv.flatten(1), weight, cos, sin, keys, values)
    for row, length in enumerate(lengths):
        qk = qkv[row, : heads + kv_heads]
        if weight is not None:
            qk = F.rms_norm(qk, (size,), eps=1e-6) * weight
        qk = qk * cos[length] + torch.roll(qk, size // 2, dims=-1) * sin[length]
        assert torch.allclose(keys[row, :, length], qk[heads:], rtol=1e-5, atol=1e-5)
        assert torch.equal(values[row, :, length], qkv[row, heads + kv_heads :])
        expected = F.scaled_dot_product_attention(
            qk[:heads].unsqueeze(1), keys[row, :, : length + 1], values[row, :, : length + 1], enable_gqa=True
        )
        assert torch.allclose(found[row].view(heads, size), expected.squeeze(1), rtol=1e-4, atol=1e-5)


def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other():
    hidden = torch.ones(3, 16)
    hidden[1, 5] = torch.nan
    weight = torch.ones(16)
    normed = kernels().add_norm(hidden, None, weight, 1e-6)
    gated = kernels().gate(normed)
    qkv = torch.cat([normed] * 8, dim=1)
    keys, values, tables = torch.zeros(3, 2, 4, 16), torch.zeros(3, 2, 4, 16), torch.ones(4, 1, 16)
    made = kernels()
    made.begin(keys, torch.tensor([0, 1, 2]))
    attended = made.attend(qkv, None, tables, tables, keys, values)
    for found in (normed, gated, attended):
        assert found.isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    decode.library.cache_clear()
    yield
    decode.library.cache_clear()


@pytest.mark.slow(ci=True)
def test_torch_computes_without_a_compiler_if_kernels_are_unset(no_compiler, tiny_spec, caplog):
    model = load_model(tiny_spec)
    with caplog.at_level(logging.INFO):
        assert decoder_class(model, "auto") is Decoder
    assert "no C++ compiler no-such-compiler" in caplog.text
    with raises_error(ExtensionError, "roll_decode", "no-such-compiler", "CXX"):
        decoder_class(model, "compiled")
    assert decoder_class(model, "torch") is Decoder


def test_kernels_for_another_precision_are_refused(tiny_spec):
    model = load_model(tiny_spec)
    assert decoder_class(model, "compiled") is CompiledDecoder
    with raises_error(UnsupportedError, "float64"):
        decoder_class(model.double(), "compiled")
    assert decoder_class(model, "auto") is Decoder


def test_rows_that_come_and_go_decode_as_with_torch(tiny_spec):
    model = load_model(tiny_spec)
    rng = np.random.default_rng(0)
    begun = [rng.integers(0, 97, size) for size in (3, 9, 1, 5, 7)]
    tokens = torch.from_numpy(rng.integers(0, 97, (20, 5)))

    def logits(chosen):
        prompts = [CachedPrompt(tokens=each) for each in begun]
        made = chosen(model, cache_bytes=1 << 24, max_rows=8)
        made.reserve(5, 40)
        made.prefill([PromptChunk(each, 0, len(each)) for each in prompts])
        made.join(prompts[:3])
        found = [made.decode(row[:3]) for row in tokens[:5]]
        made.join(prompts[3:])
        found += [made.decode(row) for row in tokens[5:10]]
        made.drop(np.array([True, False, True, True, False]))
        found += [made.decode(row[:3]) for row in tokens[10:]]
        return torch.cat(found)

    assert torch.allclose(logits(CompiledDecoder), logits(Decoder), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not HAS_ONEDNN, reason="this build of torch has no oneDNN")
def test_a_step_pads_its_rows_once_and_decodes_as_with_torch(tiny_spec, monkeypatch):
    wide = tiny_spec.random_init | {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.02}
    model = load_model(replace(tiny_spec, random_init=wide))
    rng = np.random.default_rng(0)
    begun = [rng.integers(0, 97, size) for size in rng.integers(1, 12, 19)]
    tokens = torch.from_numpy(rng.integers(0, 97, (6, 19)))
    rows_seen = []
    project = Projection.__call__
    monkeypatch.setattr(Projection, "__call__", lambda self, x: rows_seen.append(len(x)) or project(self, x))

    def logits(chosen):
        prompts = [CachedPrompt(tokens=each) for each in begun]
        made = chosen(model, cache_bytes=1 << 24, max_rows=32)
        made.reserve(19, 40)
        made.prefill([PromptChunk(each, 0, len(each)) for each in prompts])
        made.join(prompts)
        rows_seen.clear()
        found = [made.decode(row) for row in tokens[:3]]
        made.drop(np.arange(19) != 4)
        made.drop(np.arange(18) != 0)
        return torch.cat([*found, *(made.decode(row[:17]) for row in tokens[3:])])

    found = logits(CompiledDecoder)
    assert len(found) == 3 * 19 + 3 * 17
    assert {*rows_seen} == {20, 18}
    assert torch.allclose(found, logits(Decoder), rtol=1e-4, atol=1e-5)
