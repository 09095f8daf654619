"""Products with a weight equal torch's own, whichever library computes them."""

from __future__ import annotations

import pytest
import torch

from roll_core.modeling.products import HAS_ONEDNN, ONEDNN_MIN_WEIGHTS, Linear, input_gradient, linear, prefers_onednn

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
    assert not prefers_onednn(enough.bfloat16())
    assert not prefers_onednn(enough.to("meta"))
