"""Which checkpoint a run goes on from, and which it refuses."""

import json
from dataclasses import asdict

import pytest

from roll_core.errors import CheckpointMismatchError
from roll_core.runtime.records.checkpoints import CheckpointStore
from roll_core.runtime.run.checkpointing import SavedRole, SavedRun
from roll_testing.errors import mentions


@pytest.fixture
def saved(local_runs):
    """The checkpoints of a run of four steps, oldest first."""
    return CheckpointStore(local_runs.ok(local_runs.sft(save_steps=1)).run_dir.checkpoints).list()


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


@pytest.mark.parametrize("harm", [flip, cut])
@pytest.mark.parametrize("spec", [True, "auto", "run"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_the_one_before_is_taken(local_runs, saved, harm, spec):
    harm(saved[-1])
    spec = str(saved[-1].path.parent.parent) if spec == "run" else spec
    result = local_runs.ok(local_runs.sft(max_steps=5, resume_from_checkpoint=spec))
    assert resumed_from(result) == 3
    assert mentions(result.run_dir.log.read_text(encoding="utf-8"), "step-4")
    assert [line["step"] for line in local_runs.metrics(result)] == [1, 2, 3, 4, 5]


def test_a_damaged_checkpoint_that_is_asked_for_by_name_ends_the_run_and_offers_the_one_before(local_runs, saved):
    flip(saved[-1])
    result = local_runs.run(local_runs.sft(resume_from_checkpoint=str(saved[-1].path)))
    assert (result.outcome, result.steps_done) == ("failed", 0)
    assert mentions(str(result.error), "weights.safetensors")
    assert mentions(str(result.error), saved[-2].path)
    assert result.error.exit_code == 1


@pytest.mark.parametrize("spec", [True, "auto"])
def test_a_run_does_not_begin_anew_where_every_checkpoint_is_damaged(local_runs, saved, spec):
    for checkpoint in saved:
        flip(checkpoint)
    result = local_runs.run(local_runs.sft(max_steps=5, resume_from_checkpoint=spec))
    assert result.outcome == "failed"
    assert "every checkpoint in" in str(result.error)


def test_auto_begins_where_there_is_nothing_to_go_on_from(local_runs):
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


def test_only_the_newest_checkpoints_are_kept(local_runs):
    result = local_runs.ok(local_runs.sft(save_steps=1, max_steps=4, max_ckpt_to_keep=2))
    assert sorted(path.name for path in result.run_dir.checkpoints.iterdir()) == ["step-3", "step-4"]


def test_a_checkpoint_of_another_pipeline_is_refused_before_anything_starts(local_runs, saved):
    result = local_runs.run(local_runs.rlvr(resume_from_checkpoint=str(saved[-1].path)))
    assert isinstance(result.error, CheckpointMismatchError)
    assert mentions(str(result.error), "sft", "rlvr")
    assert result.error.exit_code == 2


def test_a_checkpoint_of_another_strategy_is_refused_with_the_way_out(local_runs):
    role = SavedRole(strategy="other_train", world_size=2, weight_version=1)
    run = SavedRun(pipeline="sft", pipeline_state={}, roles={"sft_train": role})
    store = CheckpointStore(local_runs.folder / "elsewhere")
    with store.writing(1, asdict(run)):
        pass
    result = local_runs.run(local_runs.sft(resume_from_checkpoint=str(store.directory / "step-1")))
    assert isinstance(result.error, CheckpointMismatchError)
    assert mentions(str(result.error), "sft_train", "other_train", "hf_train")
    assert "sft_train.strategy_args.strategy_name=other_train and portable_checkpoints=true" in str(result.error)
