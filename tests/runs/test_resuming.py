"""The checkpoint that a run resumes from, and those that it refuses."""

import json
import shutil
import time
from dataclasses import asdict
from datetime import datetime

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import CheckpointMismatchError
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.run.run_saver import SavedRole, SavedRun
from roll_core.spec.config import TokenizerConfig
from roll_testing.errors import check_error, mentions
from roll_testing.runs import TINY
from shared_tests.runs import PipelineRuns


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The output of a run of four steps."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runs = PipelineRuns(folder, "local")
        runs.ok(runs.sft(save_steps=1))
    return folder / "output"


@pytest.fixture
def saved(local_runs, output):
    """The checkpoints of a copy of that run, oldest first."""
    copy = shutil.copytree(output, local_runs.folder / "output", symlinks=True)
    return CheckpointDirectory(copy / "sft" / "001" / "checkpoints").list()


def flip(checkpoint, byte=2000):
    file = checkpoint.path / "sft_train" / "rank-0" / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[byte] ^= 4
    file.write_bytes(content)


def cut(checkpoint):
    file = checkpoint.path / "sft_train" / "rank-0" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def resumed_from(result):
    return json.loads(result.run_dir.record.read_text(encoding="utf-8"))["resumed_step"]


@pytest.mark.parametrize(("harm", "spec"), [(flip, True), (cut, "auto"), (flip, "run")])
def test_damaged_newest_checkpoint_falls_back_to_the_previous(local_runs, saved, harm, spec):
    harm(saved[-1])
    spec = str(saved[-1].path.parent.parent) if spec == "run" else spec
    result = local_runs.ok(local_runs.sft(max_steps=5, resume_from_checkpoint=spec))
    assert resumed_from(result) == 3
    assert mentions(result.run_dir.log.read_text(encoding="utf-8"), "step-4")
    assert [line["step"] for line in local_runs.metrics(result)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("spec", [True, "auto"])
def test_run_does_not_restart_if_every_checkpoint_is_damaged(local_runs, saved, spec):
    for checkpoint in saved:
        flip(checkpoint)
    result = local_runs.run(local_runs.sft(max_steps=5, resume_from_checkpoint=spec))
    assert result.outcome == "failed"
    assert "every checkpoint in" in str(result.error)


def test_auto_starts_fresh_or_resumes(local_runs):
    first = local_runs.ok(local_runs.sft(save_steps=2, max_steps=2, resume_from_checkpoint="auto"))
    assert resumed_from(first) == 0
    second = local_runs.ok(local_runs.sft(max_steps=4, resume_from_checkpoint="auto"))
    assert resumed_from(second) == 2


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/step-3"])
def test_latest_is_the_run_before_this_one(local_runs, saved, below):
    result = local_runs.ok(local_runs.sft(max_steps=5, resume_from_checkpoint=f"output/sft/latest/{below}"))
    assert resumed_from(result) == (3 if below.endswith("step-3") else 4)
    exported = local_runs.sft(max_steps=1, pretrain="output/sft/latest/export", tokenizer=None)
    del exported["sft_train"]["model_args"]["random_init"]
    again = local_runs.ok(exported)
    assert f"pretrain: {result.run_dir.export}" in again.run_dir.config.read_text(encoding="utf-8")


def test_checkpoint_of_another_pipeline_is_refused_early(local_runs, saved):
    result = local_runs.run(local_runs.rlvr(resume_from_checkpoint=str(saved[-1].path)))
    assert isinstance(result.error, CheckpointMismatchError)
    assert mentions(str(result.error), "sft", "rlvr")
    assert result.error.exit_code == 2


def test_checkpoint_of_another_strategy_is_refused_with_advice(local_runs):
    role = SavedRole(strategy="other_train", world_size=2, weight_version=1)
    run = SavedRun(pipeline="sft", pipeline_state={}, roles={"sft_train": role})
    store = CheckpointDirectory(local_runs.folder / "elsewhere")
    with store.writing(1, asdict(run)):
        pass
    result = local_runs.run(local_runs.sft(resume_from_checkpoint=str(store.directory / "step-1")))
    assert isinstance(result.error, CheckpointMismatchError)
    assert mentions(str(result.error), "sft_train", "other_train", "hf_train")
    assert "sft_train.strategy_args.strategy_name=other_train and portable_checkpoints=true" in str(result.error)


def stored_model(folder, **keys):
    """A model directory with the weights of the first one that a test writes, and other keys in its config."""
    tokenizer = make_tokenizer(TokenizerConfig(kind="char", alphabet="0123456789>"), (), folder)
    config = AutoConfig.for_model(**(TINY | keys), vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("source", "key", "value"),
    [
        ("random_init", "hidden_act", "relu"),
        ("directory", "rope_theta", 5000.0),
        ("overrides", "rope_theta", 5000.0),
    ],
)
def test_a_checkpoint_of_another_model_function_is_refused(local_runs, source, key, value):
    def config(changed, **given):
        made = local_runs.sft(save_steps=1, max_steps=2, **given)
        model = made["sft_train"]["model_args"]
        if source != "random_init":
            del model["random_init"], made["tokenizer"]
            made["pretrain"] = stored_model(local_runs.folder / f"model-{changed}", **({key: value} if changed else {}))
        if changed and source == "random_init":
            model["random_init"] = TINY | {key: value}
        if changed and source == "overrides":
            made["pretrain"] = str(local_runs.folder / "model-False")
            model["model_config_kwargs"] = {key: value}
        return made

    if source == "directory" and key == "rope_theta":
        key, value = "rope_parameters", {"rope_type": "default", "rope_theta": value}
    first = local_runs.ok(config(False))
    second = local_runs.run(config(True, resume_from_checkpoint=True), "max_steps=3")
    check_error(second.error, CheckpointMismatchError, "sft_train", key)
    assert second.error.exit_code == 2
    again = local_runs.ok(config(False, resume_from_checkpoint=str(first.run_dir.path)), "max_steps=3")
    assert resumed_from(again) == 2


def test_a_checkpoint_of_another_tokenizer_is_refused(local_runs):
    local_runs.ok(local_runs.sft(save_steps=1, max_steps=1))
    reordered = {"kind": "char", "alphabet": ">9876543210"}
    result = local_runs.run(local_runs.sft(tokenizer=reordered, resume_from_checkpoint=True))
    check_error(result.error, CheckpointMismatchError)


def test_a_resumed_run_renders_the_date_of_the_first_run(local_runs):
    model = local_runs.folder / "model"
    stored_model(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{{ strftime_now('%S%M%H') }}>{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    )
    tokenizer.save_pretrained(model)
    config = local_runs.rlvr(pretrain=str(model), tokenizer=None, prompt_length=16, save_steps=1)
    del config["actor_train"]["model_args"]["random_init"]
    first = local_runs.ok(config, "max_steps=1")
    started = json.loads(first.run_dir.record.read_text(encoding="utf-8"))["date"]
    time.sleep(1.1)
    second = local_runs.ok(config | {"resume_from_checkpoint": True}, "max_steps=2")
    assert json.loads(second.run_dir.record.read_text(encoding="utf-8"))["date"] == started
    samples = (second.run_dir.path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["step"] for line in samples} >= {1, 2}
    date = datetime.fromisoformat(started).strftime("%S%M%H>")
    assert all(json.loads(line)["prompt"].startswith(date) for line in samples)


def test_other_config_changes_are_logged_once(local_runs):
    first = local_runs.ok(local_runs.sft(save_steps=1, max_steps=1))
    config = local_runs.sft(seed=4, resume_from_checkpoint=True)
    config["sft_train"]["training_args"]["learning_rate"] = 0.02
    with (local_runs.folder / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"id": 99, "prompt": "123>", "response": "123", "ground_truth": "123"}) + "\n")
    log = local_runs.ok(config).run_dir.log.read_text(encoding="utf-8")
    (line,) = [line for line in log.splitlines() if "learning_rate" in line and "→" in line]
    keys = ("seed", "sft_train.training_args.learning_rate", "max_steps", "train.jsonl", str(first.run_dir.checkpoints))
    assert mentions(line, *keys)
    assert not mentions(line, "exp_name", "val.jsonl")


def test_an_unchanged_continuation_logs_no_changes(local_runs):
    local_runs.ok(local_runs.sft(save_steps=1, exp_name="same"))
    checkpoint = "output/same/001/checkpoints/step-2"
    result = local_runs.ok(local_runs.sft(save_steps=1, exp_name="same", resume_from_checkpoint=checkpoint))
    assert "→" not in result.run_dir.log.read_text(encoding="utf-8")


def steps_of(experiment):
    return sorted(path.parent.name for path in experiment.glob("0*/checkpoints/step-*/manifest.json"))


def test_retention_spans_the_attempts_of_a_run(local_runs):
    for max_steps in (2, 3, 5):
        config = local_runs.sft(max_steps=max_steps, save_steps=1, max_ckpt_to_keep=2, resume_from_checkpoint="auto")
        result = local_runs.ok(config)
        assert steps_of(result.run_dir.experiment) == [f"step-{max_steps - 1}", f"step-{max_steps}"]


def test_retention_spares_other_runs_and_later_steps(local_runs):
    def kept(run):
        return [checkpoint.step for checkpoint in CheckpointDirectory(run.run_dir.checkpoints).list()]

    other, first = (local_runs.ok(local_runs.sft(max_steps=3, save_steps=1)) for _ in range(2))
    resumed = {"resume_from_checkpoint": str(first.run_dir.checkpoints / "step-2"), "max_ckpt_to_keep": 1}
    second = local_runs.ok(local_runs.sft(max_steps=4, save_steps=1, **resumed))
    assert [kept(run) for run in (other, first, second)] == [[1, 2, 3], [3], [4]]


def test_retention_keeps_the_best_checkpoint_of_earlier_attempts(local_runs):
    best = {"eval_steps": 1, "save_best": {"metric": "val/loss", "mode": "max"}, "max_ckpt_to_keep": 1}
    for max_steps in (2, 4):
        config = local_runs.sft(max_steps=max_steps, save_steps=1, resume_from_checkpoint="auto", **best)
        result = local_runs.ok(config)
        assert steps_of(result.run_dir.experiment) == ["step-1", f"step-{max_steps}"]
