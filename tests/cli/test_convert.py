"""`roll-core checkpoint convert`: the model that a checkpoint holds, for transformers, without a run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from roll_core.cli.main import main
from roll_core.errors import CheckpointError, RunDirectoryError
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.run.roles import PORTABLE
from roll_core.spec.model import LoraSpec, MeshInfo, ModelSpec
from roll_core.spec.train import ParameterState, PortableState, TrainingSpec
from roll_modeling.lora import add_adapters
from roll_modeling.model import load_model
from roll_modeling.portable_files import write_portable_state
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.errors import mentions
from roll_testing.models import QWEN3, write_checkpoint
from shared_tests.stored_buffers import write_biased_checkpoint

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
    store = CheckpointDirectory(folder / "checkpoints")
    with store.writing(1, run) as path:
        for role, strategy in roles.items():
            (path / role / PORTABLE).mkdir(parents=True)
            write_portable_state(
                replace(strategy.export_state(), **changed),
                strategy.spec,
                path / role / PORTABLE,
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
def test_transformers_loads_the_model_the_strategy_exports(stored, tmp_path, task, dtype):
    strategy = trained(replace(stored(task), dtype=dtype))
    checkpoint = saved(tmp_path, {"actor_train": strategy})
    strategy.export_model(tmp_path / "export")
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]) == 0
    found, expected = (HEADS[task].from_pretrained(tmp_path / name, dtype="auto") for name in ("out", "export"))
    check_same_model(found, expected)
    assert found.dtype == expected.dtype
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    assert not torch.distributed.is_initialized()
    assert len(list((checkpoint / "actor_train" / PORTABLE).glob("state-*.safetensors"))) > 3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_buffers_without_optimizer_steps_are_converted(tmp_path, dtype):
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


def test_state_without_required_buffers_is_refused(tmp_path, capsys):
    spec, (name, *_) = write_biased_checkpoint(tmp_path / "model", seed=1)
    checkpoint = saved(tmp_path, {"actor_train": trained(spec)}, buffers={})
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]) == 2
    assert mentions(" ".join(capsys.readouterr().err.split()), name)
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


def test_randomly_initialised_model_is_converted_with_tokenizer(stored, tmp_path):
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
@pytest.mark.parametrize("extra", ["lm_head", "embed_tokens"])
def test_adapters_are_written_as_the_run_would_have(stored, tmp_path, export, extra):
    lora = LoraSpec(targets=("all-linear",), rank=4, alpha=8.0, extra_modules=(extra,), export=export)
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


MIXTURE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.fixture
def with_experts(tmp_path):
    """What a strategy has that trains adapters of experts, and the masters by name: drawn, so that B is not 0."""

    def made(export):
        spec = write_checkpoint(tmp_path / "model", MIXTURE, task="causal_lm", vocab_size=VOCABULARY)
        lora = LoraSpec(targets=("o_proj", "gate_proj", "down_proj"), rank=2, alpha=6.0, export=export)
        beside = add_adapters(load_model(spec), replace(spec, lora=replace(lora, targets=("o_proj",))))
        shapes = {name: tuple(each.shape) for name, each in beside.trained().items()}
        for layer in range(2):
            for part, (outputs, inputs) in {"gate_proj": (16, 32), "down_proj": (32, 16)}.items():
                name = f"model.layers.{layer}.mlp.experts.{part}.lora_{{}}.default.weight"
                shapes |= {name.format("A"): (4, 2, inputs), name.format("B"): (4, outputs, 2)}
        generator = torch.Generator().manual_seed(1)
        masters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        state = PortableState(
            step_count=1,
            shapes=shapes,
            read=lambda name: ParameterState(master=masters[name], exp_avg=masters[name], exp_avg_sq=masters[name]),
            adapters=beside.identity(),
        )
        return SimpleNamespace(export_state=lambda: state, spec=replace(spec, lora=lora)), masters

    return made


def apart(masters):
    """By the name of each weight: A and B of one layer or of one expert of it."""
    found = {}
    for name, a in masters.items():
        if ".lora_A." not in name:
            continue
        b, path = masters[name.replace(".lora_A.", ".lora_B.")], name.partition(".lora_A.")[0]
        if a.ndim == 2:
            found[f"{path}.weight"] = a, b
            continue
        for expert in range(4):
            found[f"{path.replace('.experts.', f'.experts.{expert}.')}.weight"] = a[expert], b[expert]
    return found


def test_adapters_of_experts_are_merged_into_each(with_experts, tmp_path):
    role, masters = with_experts("merged")
    checkpoint = saved(tmp_path, {"actor_train": role})
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    factors = apart(masters)
    assert len(factors) == 2 + 2 * 2 * 4
    assert before.keys() == after.keys()
    for name, weight in before.items():
        if name in factors:
            a, b = factors[name]
            weight = weight + 3.0 * b @ a
        torch.testing.assert_close(after[name], weight)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_expert_adapters_are_written_under_peft_names(with_experts, tmp_path):
    role, masters = with_experts("adapter")
    checkpoint = saved(tmp_path, {"actor_train": role})
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]) == 0
    expected = {
        f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight": factor
        for name, pair in apart(masters).items()
        for side, factor in zip("AB", pair, strict=True)
    }
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    targets = json.loads((tmp_path / "out" / "adapter_config.json").read_text(encoding="utf-8"))["target_modules"]
    assert {"gate_proj", "down_proj"} < set(targets)


def test_of_several_roles_one_has_to_be_named(stored, tmp_path, capsys):
    roles = {"actor_train": trained(stored()), "critic": trained(stored("value"))}
    checkpoint, out = saved(tmp_path, roles), tmp_path / "out"
    assert main(["checkpoint", "convert", str(checkpoint), str(out)]) == 2
    assert mentions(capsys.readouterr().err, "actor_train")
    assert main(["checkpoint", "convert", str(checkpoint), str(out), "--role", "critic"]) == 0
    weight = AutoModelForSequenceClassification.from_pretrained(out).score.weight
    assert torch.equal(weight, roles["critic"].model.score.weight)


def test_a_flipped_byte_is_found_before_anything_is_written(stored, tmp_path, capsys):
    checkpoint = saved(tmp_path, {"actor_train": trained(stored())})
    file = checkpoint / "actor_train" / PORTABLE / "state-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]) == CheckpointError.exit_code
    assert mentions(capsys.readouterr().err, "state-00002", "safetensors")
    assert not (tmp_path / "out").exists()


def test_convert_without_a_portable_state_names_the_key_to_set(tmp_path, capsys):
    role = {"strategy": "hf_train", "world_size": 1, "weight_version": 1}
    store = CheckpointDirectory(tmp_path / "checkpoints")
    with store.writing(1, {"pipeline": "sft", "pipeline_state": {}, "roles": {"sft_train": role}}):
        pass
    assert main(["checkpoint", "convert", str(store.directory / "step-1"), str(tmp_path / "out")]) == 2
    assert "portable_checkpoints=true" in capsys.readouterr().err


def saved_by_itself(folder, strategy, **changed):
    """A checkpoint as a run writes it by default: in the strategy's own format."""
    role = {"strategy": "hf_train", "world_size": 1, "weight_version": 1, "model": asdict(strategy.spec)} | changed
    store = CheckpointDirectory(folder / "checkpoints")
    with store.writing(1, {"pipeline": "sft", "pipeline_state": {}, "roles": {"sft_train": role}}) as path:
        (path / "sft_train" / "rank-0").mkdir(parents=True)
        strategy.save(path / "sft_train" / "rank-0")
    return store.directory / "step-1"


@pytest.mark.parametrize("adapters", [None, "merged", "adapter"])
def test_default_checkpoint_converts_to_the_strategy_export(stored, tmp_path, adapters):
    lora = adapters and LoraSpec(targets=("all-linear",), rank=4, alpha=8.0, export=adapters)
    strategy = trained(replace(stored(), dtype="bf16", lora=lora))
    checkpoint = saved_by_itself(tmp_path, strategy, world_size=8)
    strategy.export_model(tmp_path / "export")
    moved = (tmp_path / "model-causal_lm").rename(tmp_path / "moved")
    words = ["checkpoint", "convert", str(checkpoint), str(tmp_path / "out"), "--base-model", str(moved)]
    assert main(words) == 0
    file = "adapter_model.safetensors" if adapters == "adapter" else "model.safetensors"
    found, expected = (load_file(tmp_path / name / file) for name in ("out", "export"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()


def test_a_setting_of_the_strategy_is_changed_for_one_rank(stored, tmp_path, capsys):
    checkpoint = saved_by_itself(tmp_path, trained(stored()), strategy_config={"tensor_parallel": 2})
    words = ["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]
    assert main(words) == 2
    assert "tensor_parallel" in capsys.readouterr().err
    assert main([*words, "--set", "async_save_ckpt"]) == 2
    assert not (tmp_path / "out").exists()


def test_the_empty_working_directory_may_be_the_target(stored, tmp_path, monkeypatch):
    checkpoint = saved(tmp_path, {"actor_train": trained(stored())})
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "link")
    assert main(["checkpoint", "convert", str(checkpoint), "."]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_target_that_cannot_be_written_is_named(stored, tmp_path, capsys):
    checkpoint = saved(tmp_path, {"actor_train": trained(stored())})
    (tmp_path / "file").touch()
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "file" / "out")]) == 2
    assert mentions(capsys.readouterr().err, RunDirectoryError.code, tmp_path / "file" / "out")


def test_existing_output_directory_is_not_changed(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine", encoding="utf-8")
    assert main(["checkpoint", "convert", str(tmp_path), str(tmp_path / "out")]) != 0
    assert mentions(capsys.readouterr().err, RunDirectoryError.code, tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_a_models_own_directory_is_what_a_run_begins_from(stored, tmp_path, capsys):
    model = stored().path
    assert main(["checkpoint", "convert", model, str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert mentions(said, "model")
    assert f"pretrain: {model}" in said.replace("\n", "")
    assert not (tmp_path / "out").exists()


# -- merge -------------------------------------------------------------------------------------------------------------


def adapter_of_peft(spec, folder, **options):
    """An adapter as peft saves it, with random factors, and the model that peft merges from it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    base = AutoModelForCausalLM.from_pretrained(spec.path, dtype="auto")
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for each in model.parameters():
            if each.requires_grad:
                each.add_(torch.randn(each.shape), alpha=0.1)
    model.save_pretrained(folder)
    return model.merge_and_unload()


KINDS = {
    "linear": {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"q_proj": 2}, "use_rslora": True},
    "DoRA, embeddings and whole modules": {
        "target_modules": ["o_proj", "embed_tokens"],
        "use_dora": True,
        "modules_to_save": ["norm"],
    },
    "experts": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}


@pytest.mark.filterwarnings("ignore")  # of peft about transformers and embeddings
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_that_peft_saved_is_merged_as_peft_does(tmp_path, monkeypatch, kind):
    architecture = MIXTURE if kind == "experts" else QWEN3
    spec = write_checkpoint(tmp_path / "model", architecture, task="causal_lm", vocab_size=VOCABULARY)
    expected = adapter_of_peft(spec, tmp_path / "adapter", **KINDS[kind])
    if kind != "experts":  # weights are read one at a time
        monkeypatch.delattr("roll_modeling.convert.load_model")
    assert main(["checkpoint", "merge", str(tmp_path / "adapter"), str(tmp_path / "out")]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, each in expected.state_dict().items():
        assert found[name].dtype == each.dtype
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-6)
    vocabularies = [AutoTokenizer.from_pretrained(place).get_vocab() for place in (tmp_path / "out", spec.path)]
    assert vocabularies[0] == vocabularies[1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_merged_checkpoint_and_export_equal_published_weights(stored, tmp_path, dtype):
    lora = LoraSpec(targets=("all-linear",), rank=4, alpha=8.0, export="adapter")
    spec = stored()
    if dtype == "bf16":
        AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.bfloat16).save_pretrained(spec.path)
    strategy = trained(replace(spec, lora=lora, dtype=dtype))
    checkpoint = saved(tmp_path, {"actor_train": strategy})
    strategy.export_model(tmp_path / "export")
    published = {name: each.clone() for name, each in strategy.export_weights()}
    for place in (checkpoint, tmp_path / "export"):
        out = tmp_path / f"out-{place.name}"
        assert main(["checkpoint", "merge", str(place), str(out)]) == 0
        held = load_file(out / "model.safetensors")
        for name, each in held.items():
            assert torch.equal(each, published[name])


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_another_model_or_kind_is_refused(stored, tmp_path, capsys):
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    adapter_of_peft(stored(), adapter, target_modules=["q_proj"])
    wider = write_checkpoint(tmp_path / "wider", QWEN3 | {"hidden_size": 64}, task="causal_lm", vocab_size=VOCABULARY)
    config = json.loads((adapter / "adapter_config.json").read_text())
    cases = [
        (["--base-model", wider.path], {}, ("wider", "adapter")),
        (["--base-model", str(tmp_path / "none")], {}, ("none",)),
        ([], {"base_model_name_or_path": None}, ("--base-model",)),
        ([], {"task_type": "SEQ_CLS"}, ("SEQ_CLS",)),
        ([], {"target_modules": ["q_proj", "k_proj"]}, ("k_proj",)),
    ]
    for words, changed, facts in cases:
        (adapter / "adapter_config.json").write_text(json.dumps(config | changed))
        assert main(["checkpoint", "merge", str(adapter), str(out), *words]) == 2
        assert mentions(capsys.readouterr().err, *facts)
        assert not out.exists()
    (adapter / "adapter_model.safetensors").unlink()
    assert main(["checkpoint", "merge", str(adapter), str(out)]) == 2
    assert mentions(capsys.readouterr().err, "adapter_model.safetensors")
