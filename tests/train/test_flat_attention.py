"""Flat microbatches give what transformers gives for each sequence by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roll_core.data.pack import pack
from roll_core.errors import ModelError
from roll_core.spec.model import ModelSpec
from roll_core.spec.train import WantedOutputs
from roll_core.types import TrainSequence
from roll_modeling import attention
from roll_modeling.model import load_model
from roll_testing.errors import raises_error
from shared_tests.live_bytes import LiveBytes
from shared_tests.tiny_architectures import LONGROPE

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
WINDOW = {"sliding_window": 4}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
LATENT = {
    "num_key_value_heads": 4,
    # Values are smaller than queries and keys.
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
FLAT = {
    "qwen3": {**SIZES, "head_dim": 8},
    "gemma2": SIZES | MIXED | {"query_pre_attn_scalar": 8},
    # Heads of different sizes; the last two layers use keys and values of earlier ones.
    "gemma4_text": SIZES
    | WINDOW
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": 8,
        "per_layer_config": {at: {"head_dim": 16, "num_key_value_heads": 1} for at in (1, 3)},
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 61,
    },
    "granite": SIZES | {"logits_scaling": 2.0},
    "deepseek_v3": SIZES | LATENT | {"first_k_dense_replace": 1},
    "gpt_oss": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4},
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
}
"""One of each kind of attention and of positions. `tests/models` tries every type."""
PADDED = {
    # Sequences are longer than the number of keys that a query sees, those of the trial are not.
    "deepseek_v32": SIZES
    | LATENT
    | {"first_k_dense_replace": 1, "index_topk": 5, "index_n_heads": 16, "index_head_dim": 16},
    "llama4_text": SIZES | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "pad_token_id": 0},
    "bloom": {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4},
}


@pytest.fixture
def rows() -> list[TrainSequence]:
    rng = np.random.default_rng(1)
    return [
        TrainSequence(id=str(i), tokens=rng.integers(0, 61, length), loss_mask=np.arange(length) > 0)
        for i, length in enumerate((5, 1, 9, 3, 12))
    ]


def one_by_one(model, rows, temperature):
    logprobs, entropies = [], []
    for row in rows:
        tokens = torch.from_numpy(row.tokens)
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].float() / temperature
        logp = torch.log_softmax(logits, dim=-1)[:-1]
        logprobs.append(torch.cat([torch.zeros(1), logp.gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([torch.zeros(1), torch.special.entr(logits[:-1].softmax(-1)).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("model_type", FLAT)
def test_flat_sequences_equal_plain_transformers_one_by_one(build, rows, model_type):
    keys = {"model_type": model_type, **FLAT[model_type]}
    strategy = build(random_init=keys, forward_only=True)
    assert strategy.task_model.backbone.flat
    outputs = strategy.forward(pack(rows)[0], WantedOutputs(logprobs=True, entropy=True, temperature=0.7))
    logprobs, entropies = one_by_one(load_model(ModelSpec(random_init=keys, seed=3)), rows, 0.7)
    torch.testing.assert_close(outputs.logprobs_T, logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.entropy_T, entropies, rtol=0, atol=1e-5)


BY_LENGTH = {
    "longrope": LONGROPE | {"max_position_embeddings": 64},
    "dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 6,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
}
"""Rotary embeddings with other frequencies for sequences of more than 6 tokens."""


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("name", BY_LENGTH)
def test_frequencies_depend_on_the_length_of_the_sequence_alone(build, rows, name, attention):
    keys = {**SIZES, "pad_token_id": 0, **BY_LENGTH[name]}
    strategy = build(random_init=keys, forward_only=True, attn_implementation=attention)
    assert strategy.task_model.backbone.flat is (attention == "auto")
    for order in (rows, rows[::-1]):
        found = strategy.forward(pack(order)[0], WantedOutputs(logprobs=True)).logprobs_T
        alone = [one_by_one(load_model(ModelSpec(random_init=keys, seed=3)), [each], 1.0)[0] for each in order]
        torch.testing.assert_close(found, torch.cat(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", PADDED)
def test_padded_architectures_give_equal_results(build, rows, model_type):
    keys = {"model_type": model_type, **PADDED[model_type]}
    strategy = build(random_init=keys, forward_only=True)
    assert not strategy.task_model.backbone.flat
    outputs = strategy.forward(pack(rows)[0], WantedOutputs(logprobs=True))
    logprobs, _ = one_by_one(load_model(ModelSpec(random_init=keys, seed=3)), rows, 1.0)
    torch.testing.assert_close(outputs.logprobs_T, logprobs, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_recurrent_model_is_padded_inside_and_gives_the_same(build, rows):
    keys = {"model_type": "mamba", "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    strategy = build(random_init=keys, forward_only=True)
    assert not strategy.task_model.backbone.flat
    outputs = strategy.forward(pack(rows)[0], WantedOutputs(logprobs=True))
    logprobs, _ = one_by_one(load_model(ModelSpec(random_init=keys, seed=3)), rows, 1.0)
    torch.testing.assert_close(outputs.logprobs_T, logprobs, rtol=0, atol=1e-5)


def test_bf16_computes_flat_too(build, rows):
    strategy = build(dtype="bf16", forward_only=True)
    assert strategy.task_model.backbone.flat
    exact = build(forward_only=True).forward(pack(rows)[0], WantedOutputs(logprobs=True)).logprobs_T
    rounded = strategy.forward(pack(rows)[0], WantedOutputs(logprobs=True)).logprobs_T
    assert 0 < float((rounded - exact).abs().max()) < 0.2


def test_a_model_that_sees_the_future_is_refused(build):
    keys = {
        "model_type": "bert",
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "initializer_range": 0.3,
    }
    with raises_error(ModelError, "BertLMHeadModel"):
        build(random_init=keys, forward_only=True)


def test_a_named_attention_implementation_is_used_as_asked(build, rows):
    strategy = build(attn_implementation="eager", forward_only=True)
    assert not strategy.task_model.backbone.flat
    expected = build(forward_only=True).forward(pack(rows)[0], WantedOutputs(logprobs=True)).logprobs_T
    found = strategy.forward(pack(rows)[0], WantedOutputs(logprobs=True)).logprobs_T
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_a_layer_reads_no_number_from_the_device(window):
    # On `meta` there are none. On a GPU each would wait for all work that is queued.
    mask = attention.flat_mask(q_length=9, config=None, device=torch.device("meta"), local_size=window)
    query = torch.empty(1, 4, 9, 8, device="meta")
    found, _ = attention.flat_attention(
        torch.nn.Module(), query, query[:, :2], query[:, :2], mask, roll_layout=attention.FlatLayout((5, 4))
    )
    assert found.shape == (1, 9, 4, 8)


def windowed(query, key, value, lengths, window, softcap):
    """Attention by whole squares, and gradients."""
    groups, outputs = query.shape[1] // key.shape[1], []
    for q, k, v in zip(*(torch.split(each[0], lengths, dim=1) for each in (query, key, value)), strict=True):
        k, v = (each.repeat_interleave(groups, dim=0) for each in (k, v))
        scores = q @ k.mT * 0.3
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        at = torch.arange(q.shape[1])
        seen = (at[:, None] >= at) & (at[:, None] - at < window)
        outputs.append((scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)[None]


@pytest.mark.parametrize("window", [1, 3, 7, 30])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("block", [1, 4, 512])
def test_windows_in_blocks_of_queries_equal_whole_squares(monkeypatch, window, softcap, block):
    monkeypatch.setattr(attention, "MIN_BLOCK", block)
    lengths, generator = (23, 1, 7, 8), torch.Generator().manual_seed(1)
    given = [torch.randn(1, heads, 39, 6, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]
    given = [each.requires_grad_() for each in given]
    how = attention.AttentionOptions(layout=attention.FlatLayout(lengths), scale=0.3, window=window, softcap=softcap)
    found, expected = attention.attend_flat(*given, how), windowed(*given, lengths, window, softcap)
    upstream = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    bounds = {"rtol": 1e-5, "atol": 1e-6} if softcap else {"rtol": 1e-7, "atol": 1e-7}  # its softmax is float32
    torch.testing.assert_close(found, expected, **bounds)
    for one, other in zip(*(torch.autograd.grad(each, given, upstream) for each in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, **bounds)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_window_memory_grows_linearly_with_length(softcap):
    used = []
    for length in (2048, 4096):
        query = torch.randn(1, 2, length, 8, requires_grad=True)
        how = attention.AttentionOptions(layout=attention.FlatLayout((length,)), scale=0.3, window=256, softcap=softcap)
        with LiveBytes() as count:
            attention.attend_flat(query, query[:, :1], query[:, :1], how).sum().backward()
        used.append(count.most)
    assert used[1] < 2.2 * used[0]
