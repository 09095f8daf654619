"""Weights that vLLM stores in another form than transformers: what is read back is what was sent, or shows."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.engine("vllm")
HEADS, HEAD = 4, 3


def falcon(key_heads):
    """Split rows of `query_key_value` as transformers does; key heads as often as query heads if it repeats them."""
    from transformers.models.falcon.modeling_falcon import FalconAttention

    attention = SimpleNamespace(
        num_heads=HEADS, num_kv_heads=key_heads, head_dim=HEAD, multi_query=False, new_decoder_architecture=True
    )
    return lambda fused: FalconAttention._split_heads(attention, fused)


def bloom(fused):
    from transformers.models.bloom.modeling_bloom import BloomAttention

    attention = SimpleNamespace(num_heads=HEADS, head_dim=HEAD)
    parts = BloomAttention._reshape(attention, fused)
    return [part.transpose(1, 2) for part in parts]  # [1, 1, heads, units]


@pytest.mark.parametrize(("split", "key_heads"), [(bloom, HEADS), (falcon(2), 2), (falcon(HEADS), HEADS)])
def test_grouped_heads_are_as_transformers_splits_them(split, key_heads):
    from roll_infer_vllm.loaded_model import _grouped

    fused = torch.arange((HEADS + 2 * key_heads) * HEAD)
    query, key, value = (part.reshape(HEADS, HEAD) for part in split(fused[None, None]))
    every = slice(None, None, HEADS // key_heads)
    parts = [query.flatten(), key[every].flatten(), value[every].flatten()]
    for columns in ((), (2,)):  # a bias, and a matrix
        wide = [part.view(-1, *(1 for _ in columns)).expand(-1, *columns) for part in parts]
        read = _grouped(SimpleNamespace(total_num_kv_heads=key_heads), wide)
        assert torch.equal(read, fused.view(-1, *(1 for _ in columns)).expand(-1, *columns))


@pytest.mark.parametrize("stale", [False, True])
def test_a_decay_is_what_was_sent_unless_it_differs(stale, monkeypatch):
    from roll_infer_vllm import loaded_model
    from roll_infer_vllm.loaded_model import VllmModel, VllmTensor, remember_decay

    monkeypatch.setattr(loaded_model, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(loaded_model, "get_tensor_model_parallel_world_size", lambda: 1)
    name, sent = "layers.0.mamba.A_log", torch.linspace(0, 2.7, 7)
    model = torch.nn.Module()
    model.config = SimpleNamespace(model_type="falcon_h1")
    model.A = torch.nn.Parameter(-torch.exp(sent))
    remember_decay(model, name, sent)
    if stale:
        model.A.data[3] *= 1 + 1e-6
    read = VllmModel(model, "cpu").read(name, VllmTensor(module=model, parameter="A"))
    assert torch.equal(read, sent) is not stale


def test_copies_of_ranks_are_read_where_they_are_equal(monkeypatch):
    from roll_infer_vllm import loaded_model

    local = torch.tensor([[0.5, -0.0], [3.0, 4.0]], dtype=torch.bfloat16)
    ranks = torch.stack([local, local])
    monkeypatch.setattr(loaded_model, "_all_gathered", lambda tensor, dim: ranks)
    read = loaded_model._equal_copies(local)
    assert torch.equal(read.view(torch.int16), local.view(torch.int16))
    ranks[1, 1, 0] = 3.5
    assert loaded_model._equal_copies(local).isnan().tolist() == [[False, False], [True, False]]


def test_vllm_still_rounds_parameters_of_xielu():
    """When this fails, `workarounds.store_activations_in_dtype_of_model` is no longer needed."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import XIELU

    from roll_infer_vllm.workarounds import store_activations_in_dtype_of_model

    store_activations_in_dtype_of_model()
    with set_current_vllm_config(VllmConfig()):
        assert XIELU().alpha_p.dtype == torch.float32
        plain = object.__new__(XIELU)
        XIELU.__init__.__wrapped__(plain)
    assert plain.alpha_p.dtype == torch.bfloat16


def test_vllm_still_loses_constants_of_xielu_in_an_update():
    """When this fails, `workarounds.restore_activation_constants` is no longer needed."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import XIELU
    from vllm.model_executor.model_loader.reload import meta, types

    from roll_infer_vllm.workarounds import restore_activation_constants

    with set_current_vllm_config(VllmConfig()):
        activation = XIELU()
    kept = float(activation.beta), float(activation.eps)
    info = types.LayerReloadingInfo(restore_metadata=meta.capture_layer_to_meta(activation), restore_device="cpu")
    meta.restore_layer_on_meta(activation, info)
    assert activation.beta.is_meta
    assert activation.eps.is_meta
    meta.materialize_layer(activation, SimpleNamespace(restore_device=torch.device("cpu")))
    restore_activation_constants(torch.nn.ModuleList([activation]))
    assert (float(activation.beta), float(activation.eps)) == kept


def test_vllm_still_rotates_other_heads_on_a_cpu():
    """When this fails, `workarounds.rotate_every_head` is no longer needed."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from roll_infer_vllm.workarounds import rotate_every_head

    rotate_every_head()
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(32, 32, 16, 10000.0, is_neox_style=True, dtype=torch.float32)
    positions, heads = torch.arange(5) + 3, (torch.randn(5, 4, 32), torch.randn(5, 2, 32))
    expected = rotary.forward_native(positions, *heads)
    torch.testing.assert_close(rotary.forward_cpu(positions, *map(torch.clone, heads)), expected)
    flat = [each.flatten(1) for each in heads]
    torch.testing.assert_close(rotary.forward_cpu(positions, *flat), tuple(each.flatten(1) for each in expected))
    upstream, _ = RotaryEmbedding.forward_cpu.__wrapped__(rotary, positions, *map(torch.clone, heads))
    assert not torch.allclose(upstream, expected[0])


def test_vllm_still_counts_keys_of_one_expert(tmp_path):
    """When this fails, `workarounds.repeat_keys_for_experts` is no longer needed."""
    from vllm.config import ModelConfig, ParallelConfig

    from roll_infer_vllm.workarounds import repeat_keys_for_experts

    repeat_keys_for_experts()
    keys = {"model_type": "jetmoe", "architectures": ["JetMoeForCausalLM"], "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(keys | {"num_experts_per_tok": 3, "kv_channels": 16}))
    config, parallel = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True), ParallelConfig()
    assert config.get_num_kv_heads(parallel) == 6
    assert ModelConfig.get_num_kv_heads.__wrapped__(config, parallel) == 2
