"""Recomputed, offloaded and compiled blocks give the same numbers in less memory, or without compiling again."""

from __future__ import annotations

import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roll_core.algorithms.losses import sft_objective
from roll_core.data.pack import pack
from roll_core.errors import ModelError
from roll_core.spec.train import WantedOutputs
from roll_core.types import TrainSequence
from roll_modeling import blocks
from roll_strategy_deepspeed.config import DeepSpeedConfig
from roll_strategy_fsdp2.config import FSDP2Config
from roll_strategy_hf.config import HFTrainConfig
from roll_testing.errors import mentions, raises_error

TRACED = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's tracer reads it


def rows(*lengths):
    rng = np.random.default_rng(1)
    return [
        TrainSequence(id=str(at), tokens=rng.integers(0, 61, length), loss_mask=np.arange(length) > 0)
        for at, length in enumerate(lengths)
    ]


def gradient(strategy, *lengths):
    strategy.forward_backward(pack(rows(*lengths)), sft_objective())
    found = strategy.optimizer.flat_grad.clone()
    strategy.optimizer.flat_grad.zero_()
    return found


class Operators(TorchDispatchMode):
    """Calls of operators, and bytes of the storages that they returned and that still exist."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.seen = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        self.calls[operator.name()] += 1
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return found

    def num_bytes(self):
        return sum(size for storage, size in self.seen.values() if storage() is not None)


def kept_bytes(strategy, *lengths):
    """Bytes that a forward pass through the layers leaves for the backward pass."""
    (micro,) = pack(rows(*lengths))
    with Operators() as operators:
        hidden = strategy.task_model.backbone.hidden(micro.tokens_T, micro.positions_T, micro.lengths)
        found = operators.num_bytes()
    assert hidden.requires_grad
    return found


@pytest.mark.parametrize("fused", [True, False])
def test_recomputation_keeps_what_its_granularity_says(build, tiny, fused):
    def config(**keys):
        return HFTrainConfig(fused=fused, **keys)

    whole = build(config=config())
    full = build(config=config(), gradient_checkpointing=True)
    selective = build(config=config(recompute_granularity="selective"), gradient_checkpointing=True)
    expected = gradient(whole, 20, 12)
    assert torch.equal(gradient(full, 20, 12), expected)
    assert torch.equal(gradient(selective, 20, 12), expected)
    query, key = (tiny[each] * tiny["head_dim"] for each in ("num_attention_heads", "num_key_value_heads"))
    outputs = query + 2 * key + tiny["hidden_size"] + 2 * tiny["intermediate_size"] + tiny["hidden_size"]
    products = tiny["num_hidden_layers"] * 32 * outputs * 4
    assert kept_bytes(selective, 20, 12) - kept_bytes(full, 20, 12) == products
    assert kept_bytes(whole, 20, 12) > kept_bytes(selective, 20, 12)


def test_selective_recomputation_does_not_repeat_attention(build, tiny):
    def calls(config):
        strategy = build(config=config, gradient_checkpointing=True, attn_implementation="sdpa")
        with Operators() as operators:
            gradient(strategy, 20, 12)
        return operators.calls["aten::_scaled_dot_product_flash_attention_for_cpu"]

    assert calls(HFTrainConfig()) == 2 * tiny["num_hidden_layers"]
    assert calls(HFTrainConfig(recompute_granularity="selective")) == tiny["num_hidden_layers"]


@pytest.fixture
def copied(monkeypatch):
    """Bytes of each tensor that would wait on the host; they are copies, as there."""
    found = []

    def copy(tensor):
        found.append(tensor.nbytes)
        return tensor.clone()

    hooks = torch.autograd.graph.saved_tensors_hooks
    monkeypatch.setattr(blocks, "inputs_on_host", lambda _device: hooks(copy, torch.Tensor.clone))
    return found


def test_the_inputs_of_recomputed_layers_are_offloaded(build, tiny, copied):
    expected = gradient(build(), 20, 12)
    strategy = build(config=HFTrainConfig(activation_offloading=True), gradient_checkpointing=True)
    copied.clear()
    assert torch.equal(gradient(strategy, 20, 12), expected)
    assert copied == [32 * tiny["hidden_size"] * 4] * tiny["num_hidden_layers"]
    # Only the copies remain, in place of the inputs.
    assert kept_bytes(strategy, 20, 12) == kept_bytes(build(gradient_checkpointing=True), 20, 12)


def test_named_inputs_with_gradients_are_offloaded(copied):
    class Block(nn.Module):
        def forward(self, scale, *, hidden, shift, name):
            assert name == "block"
            return (scale * hidden + shift).sin()

    def run(block):
        hidden, scale = torch.linspace(0, 1, 6, requires_grad=True), torch.tensor(3.0)
        block(scale, name="block", hidden=hidden, shift=torch.ones(6)).sum().backward()
        return hidden.grad

    block = Block()
    blocks.prepare_blocks([block], recomputation="full", offload_from=torch.device("cpu"))
    assert torch.equal(run(block), run(Block()))
    assert sorted(copied) == [4, 6 * 4]


@TRACED
def test_compiled_layers_are_compiled_once_for_all_lengths(build, monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(blocks, "BACKEND", counter)
    plain = build(config=HFTrainConfig(fused=False))
    compiled = build(config=HFTrainConfig(torch_compile=True), gradient_checkpointing=True)
    assert torch.equal(gradient(compiled, 5, 9), gradient(plain, 5, 9))
    (micro,) = pack(rows(7, 4))
    compiled.forward(micro, WantedOutputs(logprobs=True))
    num_compiled = counter.frame_count
    assert num_compiled > 0
    for lengths in ((17,), (3, 4, 8), (40, 2, 2), (64,), (5, 5, 5, 5)):
        assert torch.equal(gradient(compiled, *lengths), gradient(plain, *lengths))
    (micro,) = pack(rows(11, 13, 2))
    want = WantedOutputs(logprobs=True)
    assert torch.equal(compiled.forward(micro, want).logprobs_T, plain.forward(micro, want).logprobs_T)
    assert counter.frame_count == num_compiled


@TRACED
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_inductor_computes_the_same_gradient(build):
    expected = gradient(build(config=HFTrainConfig(fused=False)), 5, 9)
    compiled = build(config=HFTrainConfig(torch_compile=True), gradient_checkpointing=True)
    found = gradient(compiled, 5, 9)
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_a_model_without_layers_cannot_be_compiled():
    with raises_error(ModelError, "torch_compile"):
        blocks.transformer_blocks(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("schema", "keys", "named"),
    [
        (HFTrainConfig, {"recompute_granularity": "selective", "activation_offloading": True}, "activation_offloading"),
        (FSDP2Config, {"recompute_granularity": "selective", "torch_compile": True}, "torch_compile"),
        (HFTrainConfig, {"fused": True, "torch_compile": True}, "fused"),
        (DeepSpeedConfig, {"fused": True, "torch_compile": True}, "fused"),
        (DeepSpeedConfig, {"zero_optimization": {"stage": 3}, "torch_compile": True}, "zero_optimization.stage"),
        (FSDP2Config, {"tensor_model_parallel_size": 2, "torch_compile": True}, "tensor_model_parallel_size"),
        (FSDP2Config, {"ep_size": 2, "torch_compile": True}, "ep_size"),
    ],
    ids=str,
)
def test_keys_that_exclude_each_other_are_refused(schema, keys, named):
    with pytest.raises(ValidationError) as raised:
        schema.model_validate(keys)
    assert mentions(str(raised.value), named)


@pytest.mark.parametrize("schema", [HFTrainConfig, FSDP2Config, DeepSpeedConfig])
@pytest.mark.parametrize("keys", [{"recompute_granularity": "full"}, {"activation_offloading": True}], ids=str)
def test_keys_of_recomputation_need_recomputation(schema, keys):
    config = schema.model_validate(keys)
    config.check_model_args({})
    with pytest.raises(ValueError, match="disable_gradient_checkpointing") as raised:
        config.check_model_args({"disable_gradient_checkpointing": True})
    assert mentions(str(raised.value), *keys)


def test_replaced_experts_are_not_compiled():
    with pytest.raises(ValueError, match="torch_compile"):
        HFTrainConfig(torch_compile=True).check_router_replay({"model_type": "qwen3_moe"})
