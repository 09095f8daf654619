"""Products with a weight equal torch's own, whichever library computes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roll_core.algorithms.losses import sft_objective
from roll_core.data.pack import pack
from roll_core.types import TrainSequence
from roll_infer_hf import decoder
from roll_kernels import products
from roll_kernels.products import (
    HAS_ONEDNN,
    ONEDNN_MIN_PRODUCTS,
    ONEDNN_MIN_WEIGHTS,
    Linear,
    input_gradient,
    linear,
    onednn_linear,
    prefers_onednn,
    weight_gradient,
)

SMALL, LARGE = (8, 12), (300, 256)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["MKL", "oneDNN"])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_both_products_equal_double_precision(shape, rows):
    torch.manual_seed(0)
    weight, x, grad = torch.randn(shape), torch.randn(rows, shape[1]), torch.randn(rows, shape[0])
    bias = torch.randn(shape[0])
    torch.testing.assert_close(
        linear(x, weight, bias).double(), x.double() @ weight.double().T + bias.double(), rtol=1e-5, atol=1e-4
    )
    torch.testing.assert_close(
        input_gradient(grad, weight).double(), grad.double() @ weight.double(), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("rows", [0, 1, 130, 1100])
@pytest.mark.parametrize("shape", [SMALL, (64, 96), (96, 64), (300, 256)], ids=str)
def test_gradients_of_weights_equal_double_precision(shape, rows):
    torch.manual_seed(2)
    grad, x = torch.randn(rows, shape[0]), torch.randn(rows, shape[1])
    found = weight_gradient(grad, x)
    assert found.shape == shape
    torch.testing.assert_close(found.double(), grad.double().T @ x.double(), rtol=1e-5, atol=5e-4)


def test_gradients_in_bfloat16_are_torchs_own():
    grad, x = torch.randn(600, 96).bfloat16(), torch.randn(600, 128).bfloat16()
    assert torch.equal(weight_gradient(grad, x), grad.T @ x)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["MKL", "oneDNN"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_equal_those_of_torchs_linear(shape, with_bias):
    torch.manual_seed(1)
    weight = torch.randn(shape, requires_grad=True)
    bias = torch.randn(shape[0], requires_grad=True) if with_bias else None
    x = torch.randn(2, 5, shape[1], requires_grad=True)
    upstream = torch.randn(2, 5, shape[0])
    inputs = [each for each in (x, weight, bias) if each is not None]
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias), inputs, upstream)
    found = torch.autograd.grad(Linear.apply(x, weight, bias), inputs, upstream)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_result_can_be_changed_in_place():
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    for rows in (x, x[0]):
        result = Linear.apply(rows, weight, None)
        result += 1
        result.sum().backward()
    torch.testing.assert_close(x.grad[1], weight.sum(dim=0).expand(3, 8))


def test_a_frozen_weight_gets_no_gradient():
    weight = torch.randn(LARGE)
    x = torch.randn(3, LARGE[1], requires_grad=True)
    Linear.apply(x, weight, None).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not HAS_ONEDNN, reason="this build of torch has no oneDNN")
def test_only_large_float32_weights_on_the_host_go_to_onednn():
    enough = torch.empty(ONEDNN_MIN_WEIGHTS // 64 + 1, 64)
    assert prefers_onednn(enough)
    assert prefers_onednn(torch.nn.Parameter(enough))
    assert not prefers_onednn(enough[:-1])
    rows = ONEDNN_MIN_PRODUCTS // enough[:-1].numel()
    assert prefers_onednn(enough[:-1], rows + 1)
    assert not prefers_onednn(enough[:-1], rows - 1)
    assert not prefers_onednn(enough.bfloat16())
    assert not prefers_onednn(enough.to("meta"))


def rows_seen(monkeypatch, module):
    """Numbers of rows with which oneDNN is called."""
    seen = set()

    def spy(x_NI, weight_OI, bias_O=None):
        seen.add(len(x_NI))
        return onednn_linear(x_NI, weight_OI, bias_O)

    monkeypatch.setattr(module, "onednn_linear", spy)
    return seen


@pytest.mark.skipif(not HAS_ONEDNN, reason="this build of torch has no oneDNN")
def test_an_engine_computes_with_few_numbers_of_rows(monkeypatch):
    """oneDNN keeps memory for each of them."""
    seen = rows_seen(monkeypatch, products)
    weight = torch.randn(LARGE)
    project = decoder.Projection(weight, None, pack=True)
    for rows in range(1, 200):
        x = torch.randn(rows, LARGE[1])
        torch.testing.assert_close(project(x), x @ weight.T, rtol=1e-4, atol=1e-4)
    assert len(seen) <= 49


@pytest.mark.skipif(not HAS_ONEDNN, reason="this build of torch has no oneDNN")
def test_ragged_microbatches_compute_with_few_numbers_of_rows(monkeypatch, build, tiny):
    seen = rows_seen(monkeypatch, products)
    strategy = build(random_init=tiny | {"hidden_size": 256, "intermediate_size": 256})
    rng = np.random.default_rng(0)
    for total in range(130, 190, 4):
        tokens = [rng.integers(3, 20, length) for length in (40, total - 40)]
        sequences = [TrainSequence(id=str(i), tokens=t, loss_mask=np.arange(len(t)) > 0) for i, t in enumerate(tokens)]
        strategy.forward_backward(pack(sequences, max_tokens=1024), sft_objective())
    assert {each for each in seen if 128 <= each < 200} <= {136, 144, 152, 160, 168, 176, 184, 192}
