"""Parameters counted from a config against transformers' own models, made without numbers."""

import json

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
)

from roll_core.data.processor import processor_of
from roll_core.errors import ModelError
from roll_core.spec.rollout import IMAGE
from roll_kernels import blocked_attention
from roll_modeling import logprobs, memory
from roll_modeling.model import image_parts
from roll_testing.errors import raises_error
from roll_testing.image_models import CONFIGS, MODEL_TYPES, tiny_vision
from roll_tools.sizes import ARCHITECTURES, WITH_IMAGES, model_size
from shared_tests.tiny_vision import picture, vision_sequence

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


QWEN2_5_VL_3B = {
    "text_config": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 128000,
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048},
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_VL_4B = {
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
    },
    "vision_config": {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "tie_word_embeddings": True,
}  # fmt: skip
VISION = [
    ("qwen2_5_vl", QWEN2_5_VL_3B),
    ("qwen2_5_vl", {**QWEN2_5_VL_3B["text_config"], **QWEN2_5_VL_3B, "text_config": None}),
    ("qwen3_vl", QWEN3_VL_4B),
    ("qwen2_5_vl", CONFIGS["qwen2_5_vl"]),
    ("qwen3_vl", CONFIGS["qwen3_vl"]),
    ("qwen2_5_vl", {}),
    ("qwen3_vl", {}),
]
"""As in the files of Qwen2.5-VL-3B, also in their older form without `text_config`, of Qwen3-VL-4B, and others."""


def check_parts(size, model):
    """The parameters of a size's parts are those of `freeze`."""
    assert size.parameters == model.num_parameters()
    parts = {
        name: {parameter for module in modules for parameter in module.parameters()}
        for name, modules in image_parts(model).items()
    }
    parts["vision"] -= parts["projector"]
    for name, parameters in parts.items():
        assert size.frozen([name]) == sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize(("model_type", "keys"), VISION)
def test_vision_parameters_are_those_of_transformers(model_type, keys):
    config = CONFIG_MAPPING[model_type](**{name: value for name, value in keys.items() if value is not None})
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    check_parts(model_size({"model_type": model_type, **keys}), model)


@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in WITH_IMAGES])
def test_vision_parameters_are_counted_by_files(tmp_path, model_type):
    tiny_vision(tmp_path, model_type)
    keys = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    size = model_size(keys, folder=tmp_path)
    check_parts(size, AutoModelForImageTextToText.from_pretrained(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    image = vision_sequence(tmp_path, IMAGE, "", picture(56, 56)).media[0]
    num_patches = processor_of(tokenizer).num_features(image) * size.vision.patches_per_token
    assert processor_of(tokenizer).inputs([image])["pixel_values"].size == num_patches * size.vision.patch_elements


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
