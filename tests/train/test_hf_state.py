"""What is saved continues bit for bit; what is exported is loaded by transformers."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from roll_core.algorithms.losses import sft_objective
from roll_core.data.pack import pack
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import CheckpointError
from roll_core.spec.config import TokenizerConfig
from roll_core.spec.model import ModelSpec
from roll_core.spec.providers import TrainProvider
from roll_core.spec.train import TrainingSpec, WantedOutputs
from roll_modeling.layout import adjacent
from roll_testing.bench import Case
from roll_testing.errors import raises_error
from roll_testing.train_kit import registry
from shared_tests.stored_buffers import check_stored_buffers

TRAINING = TrainingSpec(learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, num_steps=9, max_grad_norm=1.0)


def train(strategy, sequences, steps):
    found = []
    for _ in range(steps):
        strategy.forward_backward(pack(sequences), sft_objective())
        found.append(strategy.optimizer_step())
    return found


def weights(strategy):
    return {name: each.clone() for name, each in strategy.export_weights()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_loaded_state_continues_bit_for_bit(build, sequences, tmp_path):
    """In bf16, and with the state of random numbers, beside what the kit requires."""
    straight = build(training=TRAINING, dtype="bf16")
    train(straight, sequences, 3)
    straight.save(tmp_path)
    drawn = torch.rand(3)
    expected = train(straight, sequences, 3)

    resumed = build(training=TRAINING, dtype="bf16", seed=99)
    train(resumed, sequences, 1)  # whatever was there before is gone
    resumed.load(tmp_path)
    assert torch.equal(torch.rand(3), drawn)
    assert train(resumed, sequences, 3) == expected
    assert same(weights(resumed), weights(straight))


def test_loading_keeps_the_parameters_where_they_are(build, sequences, tmp_path):
    strategy = build(training=TRAINING)
    strategy.save(tmp_path)
    before = {name: each.data_ptr() for name, each in strategy.export_weights()}
    train(strategy, sequences, 1)
    strategy.load(tmp_path)
    assert {name: each.data_ptr() for name, each in strategy.export_weights()} == before
    attention = strategy.model.model.layers[0].self_attn
    assert adjacent([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None


def test_a_scoring_role_saves_and_loads_weights_only(build, tmp_path):
    strategy = build(forward_only=True)
    assert set(strategy.memory()) == {"weights"}
    strategy.save(tmp_path)
    assert not (tmp_path / "optimizer.safetensors").exists()
    other = build(forward_only=True, seed=8)
    other.load(tmp_path)
    assert same(weights(other), weights(strategy))


def test_no_file_of_a_state_is_a_pickle(build, sequences, tmp_path):
    strategy = build(training=TRAINING)
    train(strategy, sequences, 1)
    strategy.save(tmp_path)
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["optimizer.safetensors", "random.safetensors", "state.json", "weights.safetensors"]


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        *itertools.product(("state.json", "weights.safetensors", "optimizer.safetensors"), ("lost", "cut")),
        # It may be missing: a rank that was not there when the state was saved has none.
        ("random.safetensors", "cut"),
    ],
)
def test_a_damaged_state_is_named(build, tmp_path, file, harm):
    strategy = build(training=TRAINING)
    strategy.save(tmp_path)
    target = tmp_path / file
    if harm == "lost":
        target.unlink()
    else:
        target.write_bytes(target.read_bytes()[:40])
    with raises_error(CheckpointError, tmp_path):
        strategy.load(tmp_path)


def test_a_state_of_another_model_is_refused(build, tiny, tmp_path):
    build(training=TRAINING).save(tmp_path)
    with raises_error(CheckpointError, tmp_path):
        build(training=TRAINING, random_init=tiny | {"num_hidden_layers": 3}).load(tmp_path)
    with raises_error(CheckpointError, "model.layers.0.mlp.gate_proj.weight", "(48, 32)", "(64, 32)"):
        build(training=TRAINING, random_init=tiny | {"intermediate_size": 64}).load(tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(state | {"format": 99}))
    with raises_error(CheckpointError, "99"):
        build(training=TRAINING).load(tmp_path)


def test_tied_export_loads_in_transformers_with_equal_logits(build, sequences, tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tokenizer(TokenizerConfig(kind="char", alphabet="0123456789+="), (), tmp_path / "tokenizer")
    strategy = build(random_init=tiny | {"tie_word_embeddings": True}, tokenizer=str(tmp_path / "tokenizer"))
    train(strategy, sequences, 2)
    strategy.export_model(tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert same(weights(strategy), {name: each.detach() for name, each in model.named_parameters()})
    tokens = torch.from_numpy(sequences[4].tokens)
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=tokens[None]).logits[0], dim=-1)
    expected = logp[:-1].gather(1, tokens[1:, None])[:, 0]
    found = strategy.forward(pack([sequences[4]])[0], WantedOutputs(logprobs=True)).logprobs_T
    torch.testing.assert_close(found[1:], expected, rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.decode(tokenizer("12+3=")["input_ids"]) == "12+3="
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_exported_weights_are_live_and_tied_ones_appear_once(build, sequences, tiny):
    strategy = build(random_init=tiny | {"tie_word_embeddings": True}, training=TRAINING)
    exported = dict(strategy.export_weights())
    assert "lm_head.weight" not in exported
    before = exported["model.embed_tokens.weight"].clone()
    train(strategy, sequences, 3)
    assert not torch.equal(exported["model.embed_tokens.weight"], before)
    assert [name for name, _ in strategy.export_weights()] == list(exported)


def test_memory_is_that_of_the_tensors(build, sequences, tiny):
    strategy = build(training=TRAINING, dtype="bf16")
    train(strategy, sequences, 1)
    numbers = sum(each.numel() for each in strategy.model.parameters())
    memory = strategy.memory()
    assert memory["weights"] == 2 * numbers
    assert memory["grads"] == 4 * numbers
    assert 12 * numbers <= memory["optimizer"] < 12 * numbers + 1024


def test_transformers_buffers_are_in_the_portable_state(tmp_path):
    case = Case(
        provider=registry().find(TrainProvider, "hf_train"), strategy_config={}, model=ModelSpec(), training=TRAINING
    )
    check_stored_buffers(lambda program, *arguments: [program(0, *arguments)], case, tmp_path)
