"""`roll-core checkpoint convert`: the model that a checkpoint holds, for transformers, without a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from roll_core.builtin.hf.config import HFTrainConfig
from roll_core.builtin.hf.train import HFTrainStrategy
from roll_core.cli.main import main
from roll_core.errors import CheckpointError
from roll_core.runtime.checkpoints import CheckpointStore
from roll_core.runtime.portable_state import FOLDER, write_portable_state
from roll_core.spec.model import LoraSpec, MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec
from roll_core.testing.models import QWEN3, write_checkpoint
from roll_core.testing.stored_buffers import write_biased_checkpoint

VOCABULARY = 61
TRAINING = TrainingSpec(learning_rate=1e-2)
HEADS = {"causal_lm": AutoModelForCausalLM, "value": AutoModelForSequenceClassification}


@pytest.fixture
def stored(tmp_path):
    """Specs of stored models, by task."""
    return lambda task="causal_lm", **keys: write_checkpoint(
        tmp_path / f"model-{task}", QWEN3 | keys, task=task, vocab_size=VOCABULARY
    )


def trained(spec):
    """A strategy whose masters have left what the model's dtype can hold."""
    strategy = HFTrainStrategy(HFTrainConfig(), TRAINING)
    strategy.build(spec, MeshInfo(role="actor_train"))
    strategy.optimizer.tensors()  # made, as by a first step
    with torch.no_grad():
        for each in strategy.optimizer.masters.values():
            each.add_(torch.randn(each.shape, generator=torch.Generator().manual_seed(1)), alpha=1e-3)
        strategy.optimizer.restored(1)
    return strategy


def saved(folder, roles, **changed):
    """A checkpoint of these strategies by role, and where it is."""
    state = {"strategy": "hf_train", "world_size": 1, "weight_version": 1, "portable": True}
    run = {"pipeline": "rlvr", "pipeline_state": {}, "roles": dict.fromkeys(roles, state)}
    store = CheckpointStore(folder / "checkpoints")
    with store.writing(1, run) as path:
        for role, strategy in roles.items():
            (path / role / FOLDER).mkdir(parents=True)
            write_portable_state(
                replace(strategy.export_state(), **changed),
                strategy.spec,
                path / role / FOLDER,
                leads=True,
                file_bytes=20_000,
            )
    return store.directory / "step-1"


def check_same_model(found, expected):
    held, wanted = found.state_dict(), expected.state_dict()
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_transformers_loads_what_the_strategy_would_have_exported(stored, tmp_path, task, dtype):
    strategy = trained(replace(stored(task), dtype=dtype))
    checkpoint = saved(tmp_path, {"actor_train": strategy})
    strategy.export_model(tmp_path / "export")
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]) == 0
    found, expected = (HEADS[task].from_pretrained(tmp_path / name, dtype="auto") for name in ("out", "export"))
    check_same_model(found, expected)
    assert found.dtype == expected.dtype
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    assert not torch.distributed.is_initialized()
    assert len(list((checkpoint / "actor_train" / FOLDER).glob("state-*.safetensors"))) > 3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_no_optimizer_steps_comes_along(tmp_path, dtype):
    spec, biases = write_biased_checkpoint(tmp_path / "model", seed=1)
    strategy = trained(replace(spec, dtype=dtype))
    checkpoint = saved(tmp_path, {"actor_train": strategy})
    strategy.export_model(tmp_path / "export")
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]) == 0
    found, expected = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("out", "export")
    )
    check_same_model(found, expected)
    tokens = torch.arange(VOCABULARY)[None]
    assert torch.equal(found(tokens).logits, expected(tokens).logits)
    assert all(torch.equal(found.state_dict()[name], each) for name, each in biases.items())


def test_a_state_that_lacks_what_the_model_computes_with_is_refused(tmp_path, capsys):
    spec, (name, *_) = write_biased_checkpoint(tmp_path / "model", seed=1)
    checkpoint = saved(tmp_path, {"actor_train": trained(spec)}, buffers={})
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"lacks {name}" in said
    assert "go on with that run, and convert its next checkpoint" in said
    assert not (tmp_path / "out").exists()


def test_neither_the_run_nor_its_model_is_needed_any_more(stored, tmp_path):
    strategy = trained(stored(tie_word_embeddings=True))
    checkpoint = saved(tmp_path / "run", {"actor_train": strategy})
    strategy.export_model(tmp_path / "export")
    (tmp_path / "model-causal_lm").rename(tmp_path / "gone")
    checkpoint = checkpoint.rename(tmp_path / "step-1")
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]) == 0
    check_same_model(*(AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "export")))
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_a_model_made_from_nothing_comes_with_the_tokenizer_that_the_run_made(stored, tmp_path):
    tokenizer = stored().path
    spec = ModelSpec(random_init=QWEN3, tokenizer=tokenizer, seed=3, dtype="bf16")
    strategy = trained(spec)
    checkpoint = saved(tmp_path, {"sft_train": strategy})
    strategy.export_model(tmp_path / "export")
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]) == 0
    check_same_model(
        *(AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("out", "export"))
    )
    vocabularies = [AutoTokenizer.from_pretrained(place).get_vocab() for place in (tmp_path / "out", tokenizer)]
    assert vocabularies[0] == vocabularies[1]


@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_adapters_are_written_as_the_run_would_have(stored, tmp_path, export):
    lora = LoraSpec(targets=("all-linear",), rank=4, alpha=8.0, extra_modules=("lm_head",), export=export)
    strategy = trained(replace(stored(), lora=lora))
    checkpoint = saved(tmp_path, {"actor_train": strategy})
    strategy.export_model(tmp_path / "export")
    moved = (tmp_path / "model-causal_lm").rename(tmp_path / "moved")
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "no")]) == 2
    assert not (tmp_path / "no").exists()
    words = ["checkpoint", "convert", str(checkpoint), str(tmp_path / "out"), "--base-model", str(moved)]
    assert main(words) == 0
    file = "adapter_model.safetensors" if export == "adapter" else "model.safetensors"
    found, expected = (load_file(tmp_path / name / file) for name in ("out", "export"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_of_several_roles_one_has_to_be_named(stored, tmp_path, capsys):
    roles = {"actor_train": trained(stored()), "critic": trained(stored("value"))}
    checkpoint, out = saved(tmp_path, roles), tmp_path / "out"
    assert main(["checkpoint", "convert", str(checkpoint), str(out)]) == 2
    assert "holds several roles: give --role actor_train or critic" in capsys.readouterr().err
    assert main(["checkpoint", "convert", str(checkpoint), str(out), "--role", "critic"]) == 0
    weight = AutoModelForSequenceClassification.from_pretrained(out).score.weight
    assert torch.equal(weight, roles["critic"].model.score.weight)


def test_a_flipped_byte_is_found_before_anything_is_written(stored, tmp_path, capsys):
    checkpoint = saved(tmp_path, {"actor_train": trained(stored())})
    file = checkpoint / "actor_train" / FOLDER / "state-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]) == CheckpointError.exit_code
    assert "state-00002.safetensors does not have the digest that was recorded" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_a_portable_state_it_says_what_to_set(tmp_path, capsys):
    role = {"strategy": "hf_train", "world_size": 1, "weight_version": 1}
    store = CheckpointStore(tmp_path / "checkpoints")
    with store.writing(1, {"pipeline": "sft", "pipeline_state": {}, "roles": {"sft_train": role}}):
        pass
    assert main(["checkpoint", "convert", str(store.directory / "step-1"), str(tmp_path / "out")]) == 2
    assert "portable_checkpoints=true" in capsys.readouterr().err


def test_what_is_there_already_is_left_alone(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine", encoding="utf-8")
    assert main(["checkpoint", "convert", str(tmp_path), str(tmp_path / "out")]) != 0
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "out" / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_a_models_own_directory_is_what_a_run_begins_from(stored, tmp_path, capsys):
    model = stored().path
    assert main(["checkpoint", "convert", model, str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "is a model, not a checkpoint" in said
    assert f"pretrain: {model}" in said.replace("\n", "")
    assert not (tmp_path / "out").exists()
