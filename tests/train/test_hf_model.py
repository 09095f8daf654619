"""Models are the same for equal seeds, leave the global random state alone, and refuse what makes no sense."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import ModelError
from roll_core.spec.config import TokenizerConfig
from roll_core.spec.model import ModelSpec
from roll_core.spec.providers import TrainProvider
from roll_modeling.engine_files import engine_files
from roll_modeling.model import load_model, quiet, scalar_head
from roll_testing.bench import Case, built
from roll_testing.errors import mentions, raises_error
from roll_testing.losses import TRAINING
from roll_testing.models import write_checkpoint
from roll_testing.train_kit import registry
from shared_tests.tiny_architectures import DEEPSEEK


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.fixture
def tokenizer(tmp_path):
    make_tokenizer(TokenizerConfig(kind="char", alphabet="0123456789+="), (), tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_equal_seeds_give_equal_weights_and_keep_the_rng_state(tiny):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = load_model(ModelSpec(random_init=tiny, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert equal(one, load_model(ModelSpec(random_init=tiny, seed=1)))
    assert not equal(one, load_model(ModelSpec(random_init=tiny, seed=2)))


def test_bf16_weights_are_the_rounded_fp32_ones(tiny):
    exact = load_model(ModelSpec(random_init=tiny, seed=1))
    rounded = load_model(ModelSpec(random_init=tiny, seed=1, dtype="bf16"))
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(exact.parameters(), rounded.parameters(), strict=True))
    assert rounded.model.rotary_emb.inv_freq.dtype == torch.float32


def test_random_weights_have_the_dtypes_of_stored_ones(tmp_path):
    keys = {"model_type": "ernie4_5_moe", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
    keys |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "moe_layer_start_index": 1}
    keys |= {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2}
    made = load_model(ModelSpec(random_init=keys, dtype="bf16"))
    load_model(ModelSpec(random_init=keys)).save_pretrained(tmp_path)
    stored = load_model(ModelSpec(path=str(tmp_path), dtype="bf16"))
    dtypes = {name: each.dtype for name, each in made.named_parameters()}
    assert dtypes == {name: each.dtype for name, each in stored.named_parameters()}
    assert dtypes["model.layers.1.mlp.gate.weight"] == torch.float32


def test_the_tokenizer_gives_size_and_special_tokens(tiny, tokenizer):
    keys = {name: value for name, value in tiny.items() if name != "vocab_size"}
    model = load_model(ModelSpec(random_init=keys, tokenizer=tokenizer))
    assert model.config.vocab_size == 14
    for place in (model.config, model.generation_config):
        assert (place.pad_token_id, place.eos_token_id) == (0, 1)


@pytest.mark.parametrize(("new_head", "pad"), [(True, None), (False, 1)])
def test_end_token_of_a_trained_reward_model_is_no_padding(tiny, tokenizer, new_head, pad):
    """transformers scores the last token that is not padding; training, the last token."""
    saved = AutoTokenizer.from_pretrained(tokenizer)
    saved.pad_token = saved.eos_token
    saved.save_pretrained(tokenizer)
    keys = {name: value for name, value in tiny.items() if name != "vocab_size"}
    spec = ModelSpec(random_init=keys, tokenizer=tokenizer, task="reward", new_head=new_head)
    assert load_model(spec).config.pad_token_id == pad


def test_a_stored_model_comes_back_as_it_was(tiny, tmp_path):
    made = load_model(ModelSpec(random_init=tiny, seed=1))
    made.save_pretrained(tmp_path / "model")
    assert equal(load_model(ModelSpec(path=str(tmp_path / "model"))), made)
    changed = load_model(ModelSpec(path=str(tmp_path / "model"), config_overrides={"rope_theta": 700.0}))
    assert changed.config.rope_parameters["rope_theta"] == 700.0
    assert not torch.equal(changed.model.rotary_emb.inv_freq, made.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("model_type", ["qwen3", "granite"])
def test_critics_have_a_small_new_head_whatever_the_architecture(tiny, model_type):
    keys = {name: value for name, value in tiny.items() if name != "head_dim"} | {"model_type": model_type}
    model = load_model(ModelSpec(random_init=keys, task="value", seed=1))
    assert scalar_head(model).out_features == 1
    assert 0 < float(scalar_head(model).weight.detach().std()) < 0.1


def test_a_language_model_is_no_reward_model(tiny, tmp_path):
    load_model(ModelSpec(random_init=tiny)).save_pretrained(tmp_path / "model")
    with raises_error(ModelError, "score.weight"):
        load_model(ModelSpec(path=str(tmp_path / "model"), task="reward"))


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"model_type": "qwen33"}, ("'qwen3'",)),
        ({"hiden_size": 8}, ("'hiden_size'", "'hidden_size'")),
        ({"num_key_value_heads": 3}, ("num_attention_heads", "4", "num_key_value_heads", "3")),
        ({"model_type": "llama", "head_dim": None, "hidden_size": 30}, ("30", "4")),
        ({"hidden_size": "large"}, ("hidden_size",)),
        ({"vocab_size": 5}, ("vocab_size", "5")),
    ],
)
def test_random_models_that_make_no_sense_are_refused(tiny, tokenizer, change, facts):
    with raises_error(ModelError, *facts):
        load_model(ModelSpec(random_init=tiny | change, tokenizer=tokenizer))


def test_stored_models_that_make_no_sense_are_refused(tiny, tmp_path):
    with raises_error(ModelError, tmp_path / "nowhere"):
        load_model(ModelSpec(path=str(tmp_path / "nowhere")))
    with raises_error(ModelError, "config.json"):
        load_model(ModelSpec(path=str(tmp_path)))
    with raises_error(ModelError, "model_name_or_path", "pretrain", "random_init"):
        load_model(ModelSpec())
    with raises_error(ModelError, "vocab_size"):
        load_model(ModelSpec(random_init={"model_type": "qwen3"}))
    load_model(ModelSpec(random_init=tiny)).save_pretrained(tmp_path / "model")
    for overrides, facts in (
        ({"num_hidden_layers": 3}, ("layer_types", "2")),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, ("11",)),
        ({"nonsense": 1}, ("'nonsense'",)),
    ):
        with raises_error(ModelError, *facts):
            load_model(ModelSpec(path=str(tmp_path / "model"), config_overrides=overrides))
    (tmp_path / "model" / "model.safetensors").unlink()
    with raises_error(ModelError, tmp_path / "model"):
        load_model(ModelSpec(path=str(tmp_path / "model")))


def test_unused_deepspeed_does_not_warn_while_saving_a_model(caplog):
    logger = logging.getLogger("DeepSpeed")
    with quiet():
        logger.warning("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.")
        logger.warning("another")
    logger.warning("Setting accelerator to CPU")
    assert [record.getMessage() for record in caplog.records] == ["another", "Setting accelerator to CPU"]


def test_engines_stop_at_ends_of_tokenizer_and_model(tiny, tmp_path):
    load_model(ModelSpec(random_init=tiny | {"eos_token_id": 5})).save_pretrained(tmp_path)
    with engine_files(ModelSpec(path=str(tmp_path)), "engine") as files:
        assert files.end_ids == (5,)
    make_tokenizer(TokenizerConfig(kind="char", alphabet="0123456789+="), (), tmp_path)
    with engine_files(ModelSpec(path=str(tmp_path)), "engine") as files:
        assert files.end_ids == (1, 5)
    assert load_model(ModelSpec(path=str(tmp_path))).generation_config.eos_token_id == [1, 5]


@pytest.mark.parametrize(("stored", "pad"), [(6, 0), (1, 0)])
def test_the_padding_is_that_of_the_tokenizer(tiny, tmp_path, stored, pad):
    load_model(ModelSpec(random_init=tiny | {"pad_token_id": stored})).save_pretrained(tmp_path / "model")
    make_tokenizer(TokenizerConfig(kind="char", alphabet="0123456789+="), (), tmp_path / "tokenizer")
    spec = ModelSpec(path=str(tmp_path / "model"), tokenizer=str(tmp_path / "tokenizer"))
    model = load_model(spec)
    assert model.config.pad_token_id == model.generation_config.pad_token_id == pad


def test_multi_token_layers_are_dropped_with_a_warning(tmp_path, caplog):
    spec = write_checkpoint(tmp_path / "in", DEEPSEEK, task="causal_lm", vocab_size=61)
    description, weights = tmp_path / "in" / "config.json", tmp_path / "in" / "model.safetensors"
    keys = json.loads(description.read_text(encoding="utf-8")) | {"num_nextn_predict_layers": 1}
    description.write_text(json.dumps(keys), encoding="utf-8")
    stored = load_file(weights)
    extra = f"model.layers.{keys['num_hidden_layers']}.eh_proj.weight"
    save_file(stored | {extra: torch.zeros(2)}, weights, metadata={"format": "pt"})
    record = registry().find(TrainProvider, "hf_train")
    case = Case(provider=record, strategy_config={}, model=spec, training=TRAINING, master_port=0)
    with caplog.at_level(logging.WARNING), built(case, 0) as strategy:
        published = [name for name, _ in strategy.export_weights()]
        strategy.export_model(tmp_path / "out")
    (said,) = [each.getMessage() for each in caplog.records if each.name == "roll_modeling.pieces"]
    assert mentions(said, extra)
    assert extra not in published
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == stored.keys()
    caplog.clear()
    with built(case.with_(training=None), 0):
        assert not [each for each in caplog.records if each.name == "roll_modeling.pieces"]
