"""Parameters counted from a config against transformers' own models, made without numbers."""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config

from roll_core.errors import ModelError
from roll_kernels import blocked_attention
from roll_modeling import logprobs, memory
from roll_testing.errors import raises_error
from roll_tools.sizes import ARCHITECTURES, model_size

SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MIXTURE = {"num_experts_per_tok": 2, "num_local_experts": 6}
CASES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 32}),
    ("llama", {"num_key_value_heads": None}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen2", {"num_key_value_heads": None}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "head_dim": 16}),
    ("qwen3_moe", {"moe_intermediate_size": 24, **MIXTURE}),
    ("qwen3_moe", {"moe_intermediate_size": 24, "decoder_sparse_step": 2, **MIXTURE}),
    ("qwen3_moe", {"moe_intermediate_size": 24, "mlp_only_layers": [1], "num_experts": 4, "head_dim": 32}),
    ("mixtral", MIXTURE),
]


def made(config, task="causal_lm"):
    """The model without numbers."""
    auto = AutoModelForCausalLM if task == "causal_lm" else AutoModelForSequenceClassification
    with torch.device("meta"):
        return auto.from_config(config)


@pytest.mark.parametrize("task", ["causal_lm", "value"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("model_type", "keys"), CASES)
def test_parameters_are_those_of_transformers(model_type, keys, tied, task):
    keys = {**SMALL, "tie_word_embeddings": tied, **keys}
    config = CONFIG_MAPPING[model_type](**keys, **({"num_labels": 1} if task == "value" else {}))
    model, size = made(config, task), model_size({"model_type": model_type, **keys}, task=task)
    assert size.parameters == model.num_parameters()
    layers = model.model.layers
    assert [each.parameters for each in size.layers] == [sum(p.numel() for p in each.parameters()) for each in layers]
    for layer, module in zip(size.layers, layers, strict=True):
        for linear in layer.linears:
            assert tuple(module.get_submodule(linear.path).weight.shape) == (linear.outputs, linear.inputs)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_keys_that_are_missing_are_those_of_transformers(model_type):
    config = CONFIG_MAPPING[model_type](num_hidden_layers=2)
    size = model_size({"model_type": model_type, "num_hidden_layers": 2})
    assert size.parameters == made(config).num_parameters()
    assert size.max_positions == config.max_position_embeddings


def test_a_config_as_transformers_writes_it_is_read(tmp_path):
    config = CONFIG_MAPPING["qwen3_moe"](**SMALL, moe_intermediate_size=24, **MIXTURE)
    config.save_pretrained(tmp_path)
    assert model_size(json.loads((tmp_path / "config.json").read_text())).parameters == made(config).num_parameters()


def test_another_architecture_is_counted_by_its_files(tmp_path):
    from transformers import GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=61, n_positions=16)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)
    keys = json.loads((tmp_path / "config.json").read_text())
    keys |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    size = model_size(keys, folder=tmp_path)
    assert size.parameters == model.num_parameters()
    assert size.embedding == 61 * 32
    assert size.layers[1].parameters == sum(each.numel() for each in model.transformer.h[1].parameters())


def test_another_architecture_without_files_is_refused():
    with raises_error(ModelError, "gpt2", "qwen3_moe", "safetensors"):
        model_size({"model_type": "gpt2"})


def test_a_file_that_is_no_safetensors_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    keys = {"model_type": "other", "vocab_size": 2, "hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1}
    with raises_error(ModelError, "model.safetensors"):
        model_size(keys, folder=tmp_path)


@pytest.mark.parametrize(
    ("vocab_size", "on_host", "tokens"),
    [
        (1000, True, 134_208),
        (32_000, True, 4160),
        (152_000, True, 832),
        (10**7, True, 64),
        (32_000, False, 8384),
        (152_000, False, 1728),
    ],
)
def test_the_heads_chunk_is_of_the_device(vocab_size, on_host, tokens):
    assert memory.head_chunk(vocab_size, on_host=on_host) == tokens
    device = torch.device("cpu" if on_host else "meta")
    assert logprobs.HeadRequest().chunk(vocab_size, device) == tokens
    assert logprobs.HeadRequest(chunk_tokens=7).chunk(vocab_size, device) == 7


def test_a_given_chunk_also_limits_what_is_kept():
    assert memory.kept_tokens(152_000, None) == 1766
    assert memory.kept_tokens(152_000, 64) == 256


def test_few_numbers_of_rows_occur_and_hardly_more_are_computed():
    padded = [memory.padded_rows(rows) for rows in range(1, 8193)]
    assert all(rows <= each for rows, each in enumerate(padded, 1))
    assert all(each <= rows * 9 / 8 for rows, each in enumerate(padded, 1))
    assert all(each <= rows * 17 / 16 for rows, each in enumerate(padded, 1) if rows >= 128)
    assert len(set(padded[:128])) == 40
    assert len(set(padded)) <= 40 + 16 * 6
    assert all(memory.padded_rows(each) == each for each in padded)


def test_constants_are_those_of_the_code_that_they_describe():
    assert (memory.LONGEST_BLOCKED, memory.BLOCK) == (blocked_attention.LONGEST, blocked_attention.BLOCK)
