"""Ranks by pattern, rsLoRA, DoRA, embeddings and fused experts: the same function as peft with the exported adapter."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from roll_core.algorithms.losses import sft_objective
from roll_core.data.pack import pack
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import CheckpointError, UnsupportedError
from roll_core.spec.config import TokenizerConfig
from roll_core.spec.model import LoraSpec, ModelSpec
from roll_core.spec.train import WantedOutputs
from roll_modeling.model import load_model
from roll_testing.errors import raises_error

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_hidden_layers": 1, "num_experts_per_tok": 2}
QWEN3_MOE = DENSE | EXPERTS | {"model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 4}
GPT_OSS = DENSE | EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 4, "layer_types": ["full_attention"]}
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32}
GEMMA3 = {key: value for key, value in DENSE.items() if key != "tie_word_embeddings"}
GEMMA3 |= {"model_type": "gemma3_text", "num_hidden_layers": 1, "tie_word_embeddings": False}
LORA = LoraSpec(targets=("q_proj", "up_proj"), rank=4, alpha=12.0, export="adapter")
FUSED = ("experts.gate_up_proj", "experts.down_proj")
KINDS = {
    "patterns": (DENSE, {"rank_pattern": {"q_proj": 2, "0.mlp.up_proj": 7}, "alpha_pattern": {r"[1-9].*": 5.0}}),
    "rslora": (DENSE, {"use_rslora": True, "rank_pattern": {"q_proj": 9}}),
    "dora": (DENSE, {"use_dora": True, "alpha_pattern": {"q_proj": 3.0}}),
    "dora of a transposed layer": (GPT2, {"use_dora": True, "targets": ("c_attn", "c_proj")}),
    "embeddings": (DENSE, {"targets": ("embed_tokens", "lm_head", "q_proj")}),
    "dora of a scaled embedding": (GEMMA3, {"targets": ("embed_tokens", "o_proj"), "use_dora": True}),
    "experts": (QWEN3_MOE, {"targets": ("q_proj",), "parameters": FUSED, "rank_pattern": {"down_proj": 3}}),
    "one of two fused": (QWEN3_MOE, {"targets": ("q_proj",), "parameters": FUSED[1:], "use_rslora": True}),
    "transposed experts": (GPT_OSS, {"targets": ("q_proj",), "parameters": FUSED}),
    "modules to save": (DENSE, {"use_dora": True, "extra_modules": ("lm_head", "norm")}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """`base(keys)`: directory of a model with random weights and a tokenizer."""

    def written(keys):
        folder = tmp_path_factory.mktemp("base")
        make_tokenizer(TokenizerConfig(kind="char", alphabet="0123456789+="), (), folder)
        load_model(ModelSpec(random_init=keys, seed=7)).save_pretrained(folder)
        return str(folder)

    return written


def logprobs(strategy, sequences, **want):
    return strategy.forward(pack(sequences)[0], WantedOutputs(logprobs=True, **want)).logprobs_T


def train(strategy, sequences, steps=3):
    for _ in range(steps):
        strategy.forward_backward(pack(sequences), sft_objective())
        strategy.optimizer_step()


def loss_of(model, sequences):
    """Mean negative log-likelihood of the tokens in the losses, one sequence at a time."""
    losses = []
    for row in sequences:
        tokens = torch.from_numpy(row.tokens)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        nll = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        losses.append((nll * torch.from_numpy(row.loss_mask)[1:]).sum())
    return sum(losses) / sum(row.loss_mask.sum() for row in sequences)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_adapter_is_the_same_function_in_peft(build, sequences, base, tmp_path, kind):
    from peft import AutoPeftModelForCausalLM

    keys, options = KINDS[kind]
    path, lora = base(keys), replace(LORA, **options)
    strategy, plain = build(path=path, lora=lora), build(path=path, forward_only=True)
    before = logprobs(plain, sequences)
    torch.testing.assert_close(logprobs(strategy, sequences), before, rtol=0, atol=1e-5)
    train(strategy, sequences)
    assert float((logprobs(strategy, sequences) - before).abs().max()) > 1e-2
    torch.testing.assert_close(logprobs(strategy, sequences, base=True), before, rtol=0, atol=1e-6)

    strategy.export_model(tmp_path / "export")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft about transformers, transposed layers and patterns for parameters
        model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "export", is_trainable=True).eval()
    loss_of(model, sequences).backward()
    expected = {name.removeprefix("base_model.model."): each.grad for name, each in model.named_parameters()}
    expected = {name: each for name, each in expected.items() if each is not None}
    strategy.forward_backward(pack(sequences), sft_objective())
    found = strategy.optimizer.grads
    assert found.keys() == expected.keys()
    flat, other = (torch.cat([each[name].flatten() for name in expected]) for each in (found, expected))
    assert float((flat - other).norm() / other.norm()) < 1e-5

    merged = dict(strategy.export_weights())
    assert merged.keys() == dict(plain.model.named_parameters()).keys()
    expected = dict(model.merge_and_unload().named_parameters())
    for name, each in merged.items():
        torch.testing.assert_close(each, expected[name], rtol=1e-5, atol=1e-6)
    plain.model.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logprobs(plain, sequences), logprobs(strategy, sequences), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["patterns", "dora of a scaled embedding", "experts"])
def test_a_state_of_any_kind_continues_bit_for_bit(build, sequences, base, tmp_path, kind):
    keys, options = KINDS[kind]
    spec = {"path": base(keys), "lora": replace(LORA, **options)}
    whole, first, second = (build(**spec) for _ in range(3))
    train(whole, sequences, steps=4)
    train(first, sequences, steps=2)
    first.save(tmp_path)
    second.load(tmp_path)
    train(second, sequences, steps=2)
    for name, each in whole.adapters.trained().items():
        assert torch.equal(second.adapters.trained()[name], each)


def test_a_state_of_other_scales_is_refused(build, sequences, base, tmp_path):
    path = base(DENSE)
    build(path=path, lora=replace(LORA, alpha_pattern={"q_proj": 5.0})).save(tmp_path)
    for other in ({"alpha_pattern": {"q_proj": 6.0}}, {"use_rslora": True}, {}):
        with raises_error(CheckpointError, "alpha_pattern", "5.0"):
            build(path=path, lora=replace(LORA, **other)).load(tmp_path)


@pytest.mark.parametrize("kind", ["dora", "embeddings", "experts", "modules to save"])
def test_adapters_that_engines_cannot_serve_are_published_merged(build, base, kind):
    keys, options = KINDS[kind]
    with raises_error(UnsupportedError, "enable_lora"):
        next(iter(build(path=base(keys), lora=replace(LORA, **options)).export_adapters()))


def test_scales_of_patterns_are_in_the_exported_factors(build, sequences, base):
    strategy = build(path=base(DENSE), lora=replace(LORA, **KINDS["patterns"][1]))
    train(strategy, sequences)
    exported, merged = dict(strategy.export_adapters()), dict(strategy.export_weights())
    live = dict(strategy.model.named_parameters())
    ranks = {name: each.shape[0] for name, each in exported.items() if ".lora_A." in name}
    assert set(ranks.values()) == {2, 4, 7}
    for name in ranks:
        layer = name.removesuffix(".lora_A.weight")
        expected = live[f"{layer}.base_layer.weight"] + exported[f"{layer}.lora_B.weight"] @ exported[name]
        torch.testing.assert_close(merged[f"{layer}.weight"], expected, rtol=1e-5, atol=1e-6)
