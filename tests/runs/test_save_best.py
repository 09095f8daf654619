"""`save_best`: which checkpoint a run retains as its best one, and where users see it."""

import asyncio
import json
import math
import os
import signal

import pytest
import yaml

from roll_core.cli.main import main
from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.pipelines.sft import SFTPipeline
from roll_core.runtime.records.checkpoint_directory import BestCheckpoint, BestMetric
from roll_core.spec.config import BestCheckpointConfig


@pytest.fixture
def scored(local_runs, monkeypatch):
    """Sets the value of `val/loss` at each step: `scored({1: 3.0, …})`."""
    evaluate = SFTPipeline.evaluate

    def set_values(values):
        async def measured(pipeline, run):
            metrics = await evaluate(pipeline, run)
            return {**metrics, "val/loss": values.get(run.step, 9.0)}

        monkeypatch.setattr(SFTPipeline, "evaluate", measured)

    return set_values


def config(runs, **given):
    return runs.sft(**{"max_steps": 5, "eval_steps": 1, "save_steps": 5, "save_best": "val/loss", **given})


def best(result):
    return json.loads(result.run_dir.record.read_text(encoding="utf-8"))["best_checkpoint"]


def kept(result):
    return sorted(path.name for path in result.run_dir.checkpoints.iterdir())


def test_the_best_step_is_saved_and_outlives_newer_checkpoints(local_runs, scored):
    scored({0: 0.1, 1: 3.0, 2: 1.0, 3: 1.0, 4: math.nan, 5: 2.0})
    result = local_runs.ok(config(local_runs, max_ckpt_to_keep=1, save_steps=1))
    # Not the initial model, not the tie of step 3, not NaN: step 2.
    assert kept(result) == ["step-2", "step-5"]
    found = best(result)
    assert (found["metric"], found["mode"], found["value"], found["step"]) == ("val/loss", "min", 1.0, 2)
    assert found["path"] == str(result.run_dir.checkpoints / "step-2")


def test_steps_that_do_not_improve_are_saved_by_save_steps_only(local_runs, scored):
    scored({1: 3.0, 2: 4.0, 3: 2.0, 4: 2.5, 5: 2.5})
    assert kept(local_runs.ok(config(local_runs))) == ["step-1", "step-3", "step-5"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("val/loss", "min"),
        ("val/score/mean", "max"),
        ("train/nll", "min"),
        ("val/chosen_nll", "min"),
        ("actor/divergence", "min"),
        ("-val/score/mean", "min"),
        ({"metric": "val/loss", "mode": "max"}, "max"),
    ],
)
def test_direction_comes_from_the_config_or_the_metric_name(written, expected):
    metric = BestMetric(BestCheckpointConfig.model_validate(written), "here")
    assert metric.mode == expected
    before = BestCheckpoint(metric=metric.metric, mode=metric.mode, value=1.0, step=1, path="x")
    found = [metric.improved(2, {metric.metric: value}, before, "y") for value in (2.0, 0.5)]
    better, other = found if expected == "max" else reversed(found)
    value = 2.0 if expected == "max" else 0.5
    assert (better.value, better.step, better.path) == (value, 2, "y")
    assert other is None


def test_list_summary_and_report_name_the_best_checkpoint(local_runs, scored, capsys):
    scored({1: 3.0, 2: 1.5, 3: 2.0, 4: 2.0, 5: 2.0})
    result = local_runs.ok(config(local_runs))
    path = str(result.run_dir.checkpoints / "step-2")
    capsys.readouterr()
    assert main(["checkpoint", "list", str(result.run_dir.path), "--json"]) == 0
    rows = {row["path"]: row["best"] for row in json.loads(capsys.readouterr().out)}
    assert [row for row, value in rows.items() if value] == [path]
    assert rows[path] == {"metric": "val/loss", "value": 1.5}
    assert main(["checkpoint", "list", str(result.run_dir.path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "best (val/loss 1.5)" in line]
    assert line.startswith(path)
    assert path in result.run_dir.report.read_text(encoding="utf-8").split('id="checkpoints"')[1]


@pytest.mark.parametrize(("later", "step"), [({3: 2.0, 4: 2.0}, 1), ({3: 2.0, 4: 0.5}, 4)])
def test_a_resumed_run_compares_with_the_best_of_the_run_before(local_runs, scored, later, step):
    scored({1: 1.0, 2: 2.0} | later)
    first = local_runs.ok(config(local_runs, max_steps=2, save_steps=2, max_ckpt_to_keep=1))
    second = local_runs.ok(
        config(local_runs, max_steps=4, save_steps=1, max_ckpt_to_keep=1, resume_from_checkpoint=True)
    )
    assert kept(first) == (["step-1"] if step == 1 else [])
    assert kept(second) == ["step-4"]
    place = first if step == 1 else second
    assert best(second)["path"] == str(place.run_dir.checkpoints / f"step-{step}")


def test_a_lost_best_checkpoint_is_not_compared_with(local_runs, scored):
    scored({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    first = local_runs.ok(config(local_runs, max_steps=2, save_steps=2))
    for file in (first.run_dir.checkpoints / "step-1").rglob("*"):
        if file.is_file():
            file.unlink()
    (first.run_dir.checkpoints / "step-1").rename(first.run_dir.path / "gone")
    second = local_runs.ok(config(local_runs, max_steps=4, save_steps=4, resume_from_checkpoint=True))
    assert best(second)["step"] == 3


def test_best_checkpoint_after_disk_loss_is_the_stored_copy(tmp_path):
    """The download is deleted once its weights are loaded."""
    download = tmp_path / "resumed" / "checkpoints" / "step-2"
    download.mkdir(parents=True)
    saved = {"metric": "val/loss", "mode": "min", "value": 1.0, "step": 2, "path": str(tmp_path / "lost" / "step-2")}
    found = BestCheckpoint.read(saved, download, "s3://bucket/sft/001-0a0b0c0d/step-2")
    assert found.path == "s3://bucket/sft/001-0a0b0c0d/step-2"


def test_an_evaluation_made_up_after_sigterm_can_be_the_best(local_runs, scored, monkeypatch):
    scored({1: 3.0, 2: 1.0, 3: 2.0, 4: 2.0})
    evaluate = SFTPipeline.evaluate

    async def stopped(pipeline, run):
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(3600)
        return await evaluate(pipeline, run)

    with monkeypatch.context() as patch:
        patch.setattr(SFTPipeline, "evaluate", stopped)
        first = local_runs.run(config(local_runs, max_steps=4))
    assert (first.outcome, best(first)["step"]) == ("preempted", 1)
    second = local_runs.ok(config(local_runs, max_steps=4, resume_from_checkpoint="auto"))
    assert best(second)["path"] == str(first.run_dir.checkpoints / "step-2")


def test_metric_missing_in_the_first_evaluation_ends_the_run(local_runs):
    result = local_runs.run(config(local_runs, save_best="val/los"))
    assert isinstance(result.error, ConfigError)
    (problem,) = result.error.problems
    assert (problem.key, problem.code) == ("save_best", "ROLL-C013")
    assert "val/loss" in problem.hint
    assert (result.steps_done, result.error.exit_code) == (0, 2)


def test_metric_missing_in_the_first_step_ends_with_a_checkpoint(local_runs):
    result = local_runs.run(config(local_runs, save_best="train/nothing", save_steps=1))
    assert [problem.key for problem in result.error.problems] == ["save_best"]
    assert kept(result) == ["step-1"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"eval_steps": 0},
        {"validation": None},
        {"save_best": {"metric": "val/loss", "mode": "lowest"}},
        {"save_best": "- val/loss"},
        {"save_best": ""},
        {"save_best": 3},
    ],
    ids=str,
)
def test_a_save_best_that_cannot_be_measured_is_a_located_error(local_runs, wrong):
    path = local_runs.folder / "wrong.yaml"
    path.write_text(yaml.safe_dump(config(local_runs, **wrong), sort_keys=False), encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load(path, [], local_runs.registry)
    (problem,) = raised.value.problems
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next(at for at, line in enumerate(lines, 1) if line.startswith("save_best:"))
    assert first <= int(problem.where.split(":")[-2]) <= first + 2  # a mapping has two more lines
