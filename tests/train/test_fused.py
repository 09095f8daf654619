"""Faster modules give the numbers and gradients of those that they replace, and replace nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from roll_core.builtin.hf.config import HFTrainConfig
from roll_core.modeling import fused


def norm():
    made = Qwen3RMSNorm(24, eps=1e-5)
    nn.init.normal_(made.weight)
    return made


def mlp(activation="silu"):
    return Qwen3MLP(Qwen3Config(hidden_size=24, intermediate_size=40, hidden_act=activation))


@pytest.mark.parametrize("make", [norm, mlp])
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 50, 24), (2, 7, 3, 24), (0, 24)])
@pytest.mark.parametrize("block", [24, 200, 1 << 16])
def test_values_and_gradients_are_the_modules_own(monkeypatch, make, shape, block):
    monkeypatch.setattr(fused, "BLOCK_ELEMENTS", block)
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


def test_inputs_that_are_not_contiguous_are_understood():
    module = norm()
    x = torch.randn(24, 5).T.requires_grad_()
    plain = module(x)
    (expected,) = torch.autograd.grad(plain.square().sum(), x)
    fused.fuse(module)
    (found,) = torch.autograd.grad(module(x).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", [Gemma2RMSNorm(24), mlp("gelu"), nn.LayerNorm(24), norm().bfloat16()], ids=str)
def test_what_computes_something_else_is_left_alone(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    assert fused.fuse(module) == 0
    assert "forward" not in vars(module)


def test_it_can_be_turned_off(build):
    norms = [each for each in build().model.modules() if "forward" in vars(each)]
    assert len(norms) == 2 * 5 + 1
    assert not any("forward" in vars(each) for each in build(config=HFTrainConfig(fused=False)).model.modules())
