"""Adapters of a base model in 4 bits: equal to transformers' own quantization and to peft, and resumed bit for bit."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from roll_core.algorithms.losses import ValueObjective, sft_objective
from roll_core.data.pack import pack
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import CheckpointError, UnsupportedError
from roll_core.spec.config import TokenizerConfig
from roll_core.spec.model import LoraSpec, ModelSpec
from roll_core.spec.train import TrainingSpec, WantedOutputs
from roll_modeling.convert import write_stored_state
from roll_modeling.lora import add_adapters
from roll_modeling.model import DTYPES, load_model
from roll_testing.errors import raises_error
from shared_tests.tiny_architectures import DEEPSEEK

LORA = LoraSpec(targets=("all-linear",), rank=4, alpha=12.0, load_in_4bit=True)
PLAIN = replace(LORA, load_in_4bit=False)
SOME = LoraSpec(targets=("q_proj", "lm_head"), rank=2, alpha=4.0, extra_modules=("norm", "o_proj"), load_in_4bit=True)
TRAINING = TrainingSpec(learning_rate=1e-2, weight_decay=0.1, num_steps=9, max_grad_norm=1.0)
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


def logprobs(strategy, sequences, **want):
    return strategy.forward(pack(sequences)[0], WantedOutputs(logprobs=True, **want)).logprobs_T


@pytest.fixture
def base(tiny, tmp_path):
    """A stored base model with a tokenizer."""
    make_tokenizer(TokenizerConfig(kind="char", alphabet="0123456789+="), (), tmp_path / "base")
    load_model(ModelSpec(random_init=tiny, seed=7)).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def quantized_by_transformers(base, dtype):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=DTYPES[dtype])
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, dtype=DTYPES[dtype], device_map={"": "cpu"}
    )
    return model.train()  # in evaluation mode, bitsandbytes uses a kernel without backward pass on some CPUs


def dequantized_by_bitsandbytes(model):
    """Weights of a model of transformers."""
    from bitsandbytes.functional import dequantize_4bit

    return {
        name: dequantize_4bit(each.data, each.quant_state) if hasattr(each, "quant_state") else each.detach()
        for name, each in model.named_parameters()
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_base_model_is_what_transformers_quantizes(build, sequences, base, dtype):
    strategy = build(path=base, lora=LORA, dtype=dtype)
    model = quantized_by_transformers(base, dtype)
    expected = dequantized_by_bitsandbytes(model)
    assert same(strategy.export_weights(), expected)
    plain = dict(load_model(ModelSpec(path=base, dtype=dtype)).named_parameters())
    changed = {name.split(".")[-2] for name, each in expected.items() if not torch.equal(each, plain[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    tokens = torch.from_numpy(sequences[4].tokens)
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    known = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    found = strategy.forward(pack([sequences[4]])[0], WantedOutputs(logprobs=True)).logprobs_T
    torch.testing.assert_close(found[1:], known, rtol=0, atol=1e-5 if dtype == "fp32" else 0.05)


def test_steps_equal_peft_and_torch_on_the_transformers_model(build, sequences, base):
    strategy = build(path=base, lora=LORA, training=replace(TRAINING, lr_scheduler_type="constant"))
    config = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        plain = get_peft_model(quantized_by_transformers(base, "fp32"), config)
    state = {f"base_model.model.{name}": each.detach() for name, each in strategy.adapters.trained().items()}
    assert not plain.load_state_dict(state, strict=False).unexpected_keys
    trained = {name: each for name, each in plain.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        losses, count = [], 0
        for row in sequences:
            tokens, mask = torch.from_numpy(row.tokens), torch.from_numpy(row.loss_mask)[1:]
            logits = plain(input_ids=tokens[None], use_cache=False).logits[0]
            losses.append((torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none") * mask).sum())
            count += int(mask.sum())
        optimizer.zero_grad()
        (torch.stack(losses).sum() / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        (stats,) = train(strategy, sequences, 1)
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-4)
    for name, each in strategy.adapters.trained().items():
        torch.testing.assert_close(each, trained[f"base_model.model.{name}"], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_merged_export_is_the_dequantised_base_plus_adapters(build, sequences, base, tmp_path, dtype):
    from transformers import AutoModelForCausalLM

    strategy = build(path=base, lora=LORA, dtype=dtype)
    train(strategy, sequences)
    merged = dequantized_by_bitsandbytes(quantized_by_transformers(base, dtype))
    for name, b_OR in strategy.adapters.trained().items():
        if ".lora_B." in name:
            layer = name.partition(".lora_B.")[0]
            a_RI = strategy.model.get_parameter(name.replace(".lora_B.", ".lora_A."))
            weight = merged[f"{layer}.weight"]
            merged[f"{layer}.weight"] = (weight.float() + 3.0 * (b_OR @ a_RI)).to(weight.dtype).detach()
    for write in (strategy.export_model, lambda path: strategy._write_gathered(path, strategy.spec)):
        write(tmp_path / "export")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
        assert same(model.named_parameters(), strategy.export_weights())
        for name, each in model.named_parameters():
            torch.testing.assert_close(each, merged[name], rtol=2**-7 if dtype == "bf16" else 1e-6, atol=1e-7)
    checkpoint = strategy.export_state()
    write_stored_state(checkpoint, strategy.spec, tmp_path / "none", tmp_path / "converted")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype="auto")
    assert same(model.named_parameters(), strategy.export_weights())


@pytest.mark.parametrize(("task", "lora"), [("causal_lm", LORA), ("causal_lm", SOME), ("value", LORA)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_loaded_state_continues_bit_for_bit(build, sequences, tmp_path, task, dtype, lora):
    how = {"task": task, "dtype": dtype, "lora": lora, "training": TRAINING}
    straight = build(**how)
    train(straight, sequences)
    straight.save(tmp_path)
    expected = train(straight, sequences)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(num_threads, 2))
    resumed = build(**how)
    torch.set_num_threads(num_threads)
    resumed.load(tmp_path)
    assert train(resumed, sequences) == expected
    assert same(resumed.export_weights(), straight.export_weights())


def test_passes_change_no_weight_and_the_base_stays(build, sequences):
    strategy = build(lora=LORA, training=TRAINING)
    packed = {name: each.clone() for name, each in strategy.model.named_parameters() if each.dtype == torch.uint8}
    assert len(packed) == 14
    before = dict(strategy.export_weights())
    initial = logprobs(strategy, sequences)
    train(strategy, sequences)
    assert not torch.equal(logprobs(strategy, sequences), initial)
    assert torch.equal(logprobs(strategy, sequences, base=True), initial)
    assert all(torch.equal(strategy.model.get_parameter(name), each) for name, each in packed.items())
    assert not same(strategy.export_weights(), before)


def test_memory_is_half_a_byte_per_weight_plus_block_scales(build):
    strategy = build(lora=LORA, training=TRAINING)
    plain = build(lora=PLAIN, training=TRAINING)
    # Two layers with seven linear layers each: sizes by hand.
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    assert plain.memory()["weights"] - strategy.memory()["weights"] == 4 * weights - weights // 2 - 4 * weights // 64


def test_offloaded_weights_come_back(build, sequences):
    strategy = build(lora=LORA, training=TRAINING)
    before = logprobs(strategy, sequences)
    strategy.offload(("weights",))
    assert strategy.memory()["weights"] == 0
    assert not any(each.untyped_storage().nbytes() for each in strategy.model.parameters())
    strategy.onload(("weights",))
    assert torch.equal(logprobs(strategy, sequences), before)


def test_routers_and_experts_keep_their_dtype():
    model = load_model(ModelSpec(random_init=DEEPSEEK | {"vocab_size": 61}, seed=3))
    add_adapters(model, ModelSpec(random_init=DEEPSEEK, lora=LORA))
    kept = {name.split(".")[-2] for name, each in model.named_parameters() if each.dtype != torch.uint8}
    assert {"experts", "gate", "embed_tokens", "lm_head"} <= kept
    assert any(each.dtype == torch.uint8 for each in model.parameters())


def test_a_state_belongs_to_the_form_of_its_base_model(build, tmp_path):
    build(lora=LORA, training=TRAINING).save(tmp_path)
    with raises_error(CheckpointError, "load_in_4bit"):
        build(lora=PLAIN, training=TRAINING).load(tmp_path)
    with raises_error(CheckpointError, "random_init"):
        build(lora=LORA, training=TRAINING, seed=99).load(tmp_path)


def test_adapters_of_a_quantized_base_are_not_exported(build):
    with raises_error(UnsupportedError, "load_in_4bit", "enable_lora"):
        next(iter(build(lora=LORA).export_adapters()))


def test_models_of_other_libraries_are_refused(tiny):
    model = load_model(ModelSpec(random_init=tiny))
    with raises_error(UnsupportedError, "load_in_4bit"):
        add_adapters(model, ModelSpec(library="acme:Library", lora=LORA))


def test_a_missing_library_names_the_extra(build, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises_error(UnsupportedError, "load_in_4bit", "bitsandbytes", "roll-modeling[qlora]"):
        build(lora=LORA)
