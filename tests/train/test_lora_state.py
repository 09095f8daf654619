"""A state of adapters continues bit for bit and holds no base model; exports are loaded by transformers and by peft."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from roll_core.algorithms.losses import ValueObjective, sft_objective
from roll_core.data.pack import pack
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import CheckpointError, UnsupportedError
from roll_core.spec.config import TokenizerConfig
from roll_core.spec.model import LoraSpec, ModelSpec
from roll_core.spec.train import TrainingSpec, WantedOutputs
from roll_modeling.model import DTYPES, load_model
from roll_testing.errors import raises_error
from roll_testing.models import write_checkpoint
from shared_tests.tiny_architectures import DEEPSEEK

TRAINING = TrainingSpec(learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, num_steps=9, max_grad_norm=1.0)
LORA = LoraSpec(targets=("all-linear",), rank=4, alpha=12.0)
EXTRA = LoraSpec(targets=("q_proj", "v_proj"), rank=2, alpha=4.0, extra_modules=("norm",))
OBJECTIVES = {"causal_lm": sft_objective(), "value": ValueObjective()}


def train(strategy, sequences, steps=3):
    found = []
    for _ in range(steps):
        strategy.forward_backward(pack(sequences), OBJECTIVES[strategy.spec.task])
        found.append(strategy.optimizer_step())
    return found


def same(one, other):
    one, other = dict(one), dict(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def base(tiny, tmp_path):
    """A stored base model with a tokenizer, as people have one."""
    make_tokenizer(TokenizerConfig(kind="char", alphabet="0123456789+="), (), tmp_path / "base")
    load_model(ModelSpec(random_init=tiny, seed=7)).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.parametrize(
    ("task", "dtype", "lora"), [("causal_lm", "fp32", LORA), ("causal_lm", "bf16", EXTRA), ("value", "bf16", LORA)]
)
def test_a_loaded_state_continues_bit_for_bit(build, sequences, tmp_path, task, dtype, lora):
    how = {"task": task, "dtype": dtype, "lora": lora, "training": TRAINING}
    straight = build(**how)
    train(straight, sequences)
    straight.save(tmp_path)
    expected = train(straight, sequences)

    resumed = build(**how)
    train(resumed, sequences, 1)  # whatever was there before is gone
    resumed.load(tmp_path)
    assert train(resumed, sequences) == expected
    assert same(resumed.export_weights(), straight.export_weights())
    assert same(resumed.adapters.trained(), straight.adapters.trained())


def test_state_contains_trained_weights_only(build, sequences, tmp_path):
    strategy = build(lora=LORA, training=TRAINING)
    train(strategy, sequences)
    strategy.save(tmp_path)
    names = {name for name, each in strategy.model.named_parameters() if each.requires_grad}
    assert load_file(tmp_path / "weights.safetensors").keys() == names
    moments = {f"{moment}.{name}" for name in names for moment in ("exp_avg", "exp_avg_sq")}
    assert load_file(tmp_path / "optimizer.safetensors").keys() == moments


def test_state_resumes_only_on_its_base_model(build, tmp_path):
    build(lora=LORA, training=TRAINING).save(tmp_path)
    with raises_error(CheckpointError, "random_init"):
        build(lora=LORA, training=TRAINING, seed=99).load(tmp_path)
    with raises_error(CheckpointError, "rank 4", "12.0", "lora_rank", "4", "lora_alpha", "8"):
        build(lora=replace(LORA, alpha=8.0), training=TRAINING).load(tmp_path)
    with raises_error(CheckpointError, "model.layers.0.mlp.down_proj.lora_A.default.weight"):
        build(lora=replace(LORA, targets=("q_proj",)), training=TRAINING).load(tmp_path)
    with raises_error(CheckpointError, "lora_target"):
        build(training=TRAINING).load(tmp_path)


def test_adapters_do_not_load_a_whole_model(build, tmp_path):
    build(training=TRAINING).save(tmp_path)
    with raises_error(CheckpointError, "lora_target"):
        build(lora=LORA, training=TRAINING).load(tmp_path)


def logits(model, sequences):
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(sequences[4].tokens)[None], use_cache=False).logits


def check(strategy, model, sequences, atol=1e-5):
    """The strategy's own logprobs are those of a loaded model's logits."""
    tokens = torch.from_numpy(sequences[4].tokens)
    expected = torch.log_softmax(logits(model, sequences)[0].float(), dim=-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    found = strategy.forward(pack([sequences[4]])[0], WantedOutputs(logprobs=True)).logprobs_T
    torch.testing.assert_close(found[1:], expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("tied", "extra", "dtype"),
    [
        (False, (), "bf16"),
        (True, (), "fp32"),
        (False, ("embed_tokens",), "fp32"),
        (False, ("embed_tokens", "lm_head"), "bf16"),
    ],
)
def test_a_merged_export_is_an_ordinary_model(build, sequences, tiny, tmp_path, tied, extra, dtype):
    from transformers import AutoModelForCausalLM

    lora = replace(LORA, extra_modules=extra)
    strategy = build(random_init=tiny | {"tie_word_embeddings": tied}, lora=lora, dtype=dtype)
    train(strategy, sequences)
    strategy.export_model(tmp_path / "export")
    names = {each.name for each in (tmp_path / "export").iterdir()}
    assert "model.safetensors" in names
    assert not any("adapter" in name for name in names)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert same(strategy.export_weights(), model.named_parameters())
    assert model.lm_head.weight.dtype == DTYPES[dtype]
    check(strategy, model, sequences, 1e-5 if dtype == "fp32" else 0.1)


def test_exported_adapters_load_in_peft_on_their_base_model(build, sequences, base, tmp_path):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    strategy = build(path=base, lora=replace(EXTRA, export="adapter"))
    train(strategy, sequences)
    strategy.export_model(tmp_path / "export")
    assert not (tmp_path / "export" / "model.safetensors").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own use of transformers
        model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "export")
    check(strategy, model, sequences)
    merged = dict(strategy.export_weights())
    assert same(merged, model.merge_and_unload().named_parameters())
    config = json.loads((tmp_path / "export" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.decode(tokenizer("12+3=")["input_ids"]) == "12+3="


@pytest.mark.parametrize("target", ["all-linear", "gate_proj", "o_proj"])
def test_an_adapter_that_peft_would_not_load_is_refused(build, tmp_path, target):
    spec = write_checkpoint(tmp_path, DEEPSEEK, task="causal_lm", vocab_size=61)
    lora = LoraSpec(targets=(target,), rank=2, alpha=4.0, export="adapter")
    if target == "o_proj":
        build(path=spec.path, lora=lora)
        return
    with raises_error(UnsupportedError, "lora_export", "model.layers.0.mlp", "deepseek_v3"):
        build(path=spec.path, lora=lora)


def test_buffers_of_modules_trained_in_full_are_exported_once(build, sequences, tmp_path):
    from transformers import AutoModelForCausalLM

    keys = DEEPSEEK | {"vocab_size": 61}
    strategy = build(random_init=keys, lora=replace(LORA, extra_modules=("mlp.gate",)))
    train(strategy, sequences)
    for write in (strategy.export_model, lambda path: strategy._write_gathered(path, strategy.spec)):
        write(tmp_path / "export")
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        check(strategy, model, sequences, 3e-5)


def test_a_critics_adapters_bring_its_head(build, sequences, base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    strategy = build(path=base, task="value", lora=replace(LORA, export="adapter"))
    train(strategy, sequences)
    strategy.export_model(tmp_path / "export")
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own use of transformers
        model = PeftModel.from_pretrained(plain, tmp_path / "export")
    merged = dict(model.merge_and_unload().named_parameters())
    assert same(strategy.export_weights(), merged)


def test_adapters_of_an_unnamed_model_are_not_exported_alone(build, tmp_path):
    with raises_error(UnsupportedError, "base"):
        build(lora=replace(LORA, export="adapter")).export_model(tmp_path)
