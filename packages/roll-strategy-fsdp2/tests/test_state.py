"""What is saved continues bit for bit, on as many ranks or on others; what is exported is loaded by transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from fsdp2_programs import (
    LORA,
    MOE,
    TINY,
    TRAINING,
    Job,
    away_and_back,
    continue_after,
    export,
    furthest_from,
    load_each,
    load_into,
    portable,
    same_weights,
    save_after,
    sequences,
    train,
)
from safetensors.torch import load_file

from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import CheckpointError, UnsupportedError
from roll_core.spec.config import TokenizerConfig
from roll_core.spec.model import ModelSpec
from roll_core.spec.providers import TrainProvider
from roll_modeling.model import load_model
from roll_testing.bench import Case
from roll_testing.errors import mentions, raises_error
from roll_testing.models import QWEN3, write_checkpoint
from roll_testing.ranks import RanksFailedError
from roll_testing.train_kit import registry
from shared_tests.moving_average import check_moving_average
from shared_tests.stored_buffers import check_stored_buffers

# The kit checks the state of two ranks in `./run test`; these take minutes.
pytestmark = pytest.mark.engine

BF16 = {"dtype": "bf16"}
TENSOR = {"tensor_model_parallel_size": 2}
MUON = "roll_core.algorithms.optimizers:muon"


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """`saved(job, done)`: where a job's state after `done` steps lies, and its next three steps; made once."""
    made = {}

    def state(job, done):
        key = repr((job, done))
        if key not in made:
            folder = tmp_path_factory.mktemp("state")
            made[key] = folder, ranks(save_after, job, folder, done)
        return made[key]

    return state


@pytest.mark.parametrize(
    ("model", "later"),
    [
        pytest.param({}, False, id="fp32, at once"),
        pytest.param({}, True, id="fp32, meanwhile", marks=pytest.mark.slow),
        pytest.param(BF16, False, id="bf16, at once", marks=pytest.mark.slow),
        pytest.param(BF16, True, id="bf16, meanwhile"),
        pytest.param({"lora": LORA}, False, id="adapters, at once"),
        pytest.param({"lora": LORA}, True, id="adapters, meanwhile", marks=pytest.mark.slow),
        pytest.param({"lora": replace(LORA, load_in_4bit=True)}, False, id="adapters, 4 bits", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("done", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("optimizer", ["", MUON])
def test_a_loaded_state_continues_bit_for_bit(ranks, saved, model, done, later, optimizer):
    training = replace(TRAINING, optimizer=optimizer)
    config = {"async_save_ckpt": True} if later else {}
    job = Job(world_size=2, model=model, config=config, training=training)
    folder, straight = saved(job, done)
    # Adapters stand on a model that is not part of the state.
    resumed = ranks(continue_after, job.with_(model=model | {"seed": 3 if "lora" in model else 99}), folder, done)
    for one, other in zip(resumed, straight, strict=True):
        assert one["steps"] == other["steps"]
        assert same_weights(one["weights"], other["weights"])
        assert one["drawn"] == other["drawn"]


@pytest.mark.parametrize(
    "job",
    [
        Job(),
        Job(world_size=3),
        Job(world_size=4, config={"fsdp_size": 2}),
        Job(world_size=2, config={"offload_policy": True}),
        Job(world_size=2, config=TENSOR),
        Job(world_size=4, config=TENSOR),
    ],
    ids=["1", "3", "2 x 2", "2, on the host", "tensor 2", "2 x tensor 2"],
)
def test_a_state_continues_on_another_number_of_ranks(ranks, saved, job):
    folder, straight = saved(Job(world_size=2), 2)
    resumed = ranks(continue_after, job, folder, 2)
    # The very same numbers were read; sums over another number of ranks then differ by rounding.
    assert same_weights(resumed[0]["loaded"], straight[0]["loaded"])
    assert furthest_from(resumed[0]["weights"], straight[0]["weights"]) < 2e-5
    for (loss, one), (_, other) in zip(resumed[0]["steps"], straight[0]["steps"], strict=True):
        assert np.isfinite(loss)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        assert one["learning_rate"] == other["learning_rate"]


@pytest.mark.parametrize(
    "job",
    [Job(world_size=4, config=TENSOR), Job(world_size=4, config={"ep_size": 2}, model={"random_init": MOE})],
    ids=["tensor 2", "experts 2"],
)
def test_a_state_of_ranks_that_hold_pieces_continues_without(ranks, saved, job):
    folder, straight = saved(job, 2)
    resumed = ranks(continue_after, Job(model=job.model), folder, 2)
    assert same_weights(resumed[0]["loaded"], straight[0]["loaded"])
    assert furthest_from(resumed[0]["weights"], straight[0]["weights"]) < 2e-5


def test_asynchronous_checkpoint_equals_a_synchronous_one(saved):
    """The same files with the same numbers; the order of what their headers say is not fixed."""
    one, other = (
        saved(Job(world_size=2, config=config), 2)[0] / "rank-0" for config in ({}, {"async_save_ckpt": True})
    )
    for file in ("state.json", "written-0.json", "written-1.json"):
        assert (one / file).read_bytes() == (other / file).read_bytes()
    for file in (one / "tensors").iterdir():
        found, expected = load_file(other / "tensors" / file.name), load_file(file)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("config", [{"fsdp_size": 2}, TENSOR | {"fsdp_size": 1}], ids=["2 x 2", "2 x tensor 2"])
def test_replicated_state_is_written_once(saved, config):
    folder, _ = saved(Job(world_size=4, config=config), 1)
    numbers = sum(
        4 * np.prod(shape) for shape in (each.shape for each in saved(Job(world_size=2), 2)[1][0]["weights"].values())
    )
    written = sum(each.stat().st_size for each in (folder / "rank-0" / "tensors").iterdir())
    assert 3 * numbers <= written < 3 * numbers + 100_000


def test_no_file_of_a_state_is_a_pickle(saved):
    folder, _ = saved(Job(world_size=2), 2)
    names = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    assert {name for name in names if not name.endswith((".safetensors", ".json"))} == set()


@pytest.mark.parametrize(
    ("config", "model"),
    [({}, {"dtype": "bf16", "lora": LORA}), (TENSOR, {})],
    ids=["2, bf16, adapters", "tensor 2, fp32"],
)
def test_memory_that_is_moved_away_comes_back_bit_for_bit(ranks, config, model):
    for held, errors, moved, stayed in ranks(away_and_back, Job(world_size=2, config=config, model=model)):
        before, away, back = held
        assert min(before.values()) > 0
        assert away == dict.fromkeys(before, 0)
        assert back == before
        assert all(error.is_a(UnsupportedError) for error in errors)
        assert moved["steps"] == stayed["steps"]
        assert same_weights(moved["weights"], stayed["weights"])


@pytest.mark.parametrize(
    ("config", "model"),
    [({"fsdp_size": 2}, {}), (TENSOR | {"ulysses_size": 2}, {}), ({"ep_size": 2}, {"random_init": MOE})],
    ids=["2 x 2", "2 x tensor 2", "experts 2"],
)
def test_portable_state_is_equal_on_any_ranks(ranks, config, model):
    (alone,) = ranks(portable, Job(world_size=1, model=model))
    for each in ranks(portable, Job(world_size=4, config=config, model=model)):
        assert each.keys() == alone.keys()
        assert max(float(np.abs(each[name] - alone[name]).max()) for name in alone) < 2e-5


def cut(file):
    file.write_bytes(file.read_bytes()[:-40])


HARMS = {
    "state.json lost": lambda rank: (rank / "state.json").unlink(),
    "state.json cut": lambda rank: cut(rank / "state.json"),
    "state.json of another format": lambda rank: rewrite(rank / "state.json", format=99),
    "written-1.json lost": lambda rank: (rank / "written-1.json").unlink(),
    "shard lost": lambda rank: min((rank / "tensors").iterdir()).unlink(),
    "shard cut": lambda rank: cut(min((rank / "tensors").iterdir())),
}


def rewrite(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_damaged_state_is_named(ranks, saved, tmp_path):
    folder, _ = saved(Job(world_size=2), 2)
    copies = {name: tmp_path / f"copy-{number}" for number, name in enumerate(HARMS)}
    for name, copy in copies.items():
        shutil.copytree(folder, copy)
        HARMS[name](copy / "rank-0")
    for errors in ranks(load_each, Job(world_size=2), list(copies.values())):
        for (name, copy), error in zip(copies.items(), errors, strict=True):
            assert error is not None, name
            assert error.is_a(CheckpointError), (name, error)
            assert mentions(error.message, copy, *(["99"] if "format" in name else []))


@pytest.mark.parametrize("change", [{"num_hidden_layers": 3}, {"intermediate_size": 64}])
def test_a_state_of_another_model_is_refused(ranks, saved, change):
    folder, _ = saved(Job(world_size=2), 2)
    with raises_error(RanksFailedError, "CheckpointError"):
        ranks(load_into, Job(world_size=2, model={"random_init": TINY | change}), folder)


def test_adapter_state_is_for_its_base_model_on_any_ranks(ranks, saved):
    job = Job(world_size=2, model={"lora": LORA})
    folder, straight = saved(job, 2)
    assert all("lora" in name for name in straight[0]["names"])
    resumed = ranks(continue_after, job.with_(world_size=3), folder, 2)
    assert same_weights(resumed[0]["loaded"], straight[0]["loaded"])
    with raises_error(RanksFailedError, "CheckpointError", "base"):
        ranks(load_into, job.with_(model={"lora": LORA, "seed": 8}), folder)
    with raises_error(RanksFailedError, "CheckpointError"):
        ranks(load_into, Job(world_size=2), folder)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
def test_adapters_are_exported_as_peft_loads_them(ranks, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    make_tokenizer(TokenizerConfig(kind="char", alphabet="0123456789+="), (), tmp_path / "base")
    load_model(ModelSpec(random_init=TINY, seed=3)).save_pretrained(tmp_path / "base")
    model = {"path": str(tmp_path / "base"), "lora": replace(LORA, export="adapter")}
    answers = ranks(export, Job(world_size=2, model=model), tmp_path / "export")
    assert not (tmp_path / "export" / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merged = PeftModel.from_pretrained(base, tmp_path / "export").merge_and_unload()
    assert (
        furthest_from(answers[0]["weights"], {name: each.detach().numpy() for name, each in merged.named_parameters()})
        < 1e-6
    )


def test_a_scoring_role_reads_back_its_own_state(ranks, saved):
    job = Job(world_size=2, training=None)
    folder, straight = saved(job, 0)
    assert not any("exp_avg" in name for name in straight[0]["names"])
    resumed = ranks(continue_after, job.with_(model={"seed": 8}), folder, 0)
    assert same_weights(resumed[0]["loaded"], straight[0]["loaded"])


@pytest.mark.parametrize("tied", [False, True])
def test_export_is_loaded_by_transformers_with_equal_logits(ranks, tmp_path, tied):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tokenizer(TokenizerConfig(kind="char", alphabet="0123456789+="), (), tmp_path / "tokenizer")
    model = {"random_init": TINY | {"tie_word_embeddings": tied}, "tokenizer": str(tmp_path / "tokenizer")}
    answers = ranks(export, Job(world_size=2, model=model), tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert same_weights(
        answers[0]["weights"], {name: each.detach().numpy() for name, each in loaded.named_parameters()}
    )
    scored = {name: rows for each in answers for name, rows in each["scored"].items()}
    row = sequences()[4]
    tokens = torch.from_numpy(row.tokens)
    with torch.no_grad():
        logp = torch.log_softmax(loaded(input_ids=tokens[None]).logits[0], dim=-1)
    expected = logp[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
    np.testing.assert_allclose(scored[row.id][1:, 0], expected, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "export").decode([1, 2])


def test_an_export_in_bf16_says_so_and_trains_on(ranks, tmp_path):
    answers = ranks(export, Job(world_size=2, model=BF16), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    again = ranks(train, Job(world_size=2, model=BF16 | {"path": str(tmp_path)}, training=TRAINING), 1)
    assert same_weights(again[0]["before"], answers[0]["weights"])


CASE = Case(
    provider=registry().find(TrainProvider, "fsdp2_train"),
    strategy_config={},
    model=ModelSpec(),
    training=TRAINING,
    world_size=2,
    devices=("cpu",) * 2,
)


def test_stored_buffers_are_part_of_the_portable_state(ranks, tmp_path):
    check_stored_buffers(ranks, CASE, tmp_path)


@pytest.mark.parametrize("config", [{}, {"offload_policy": True, "reshard_after_forward": False}], ids=str)
def test_moving_average_equals_hf_train_and_resumes_exactly(ranks, tmp_path, config):
    model = write_checkpoint(tmp_path / "model", QWEN3, task="causal_lm", vocab_size=TINY["vocab_size"])
    check_moving_average(ranks, CASE.with_(model=model, strategy_config=config), tmp_path)
