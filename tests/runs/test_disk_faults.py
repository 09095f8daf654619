"""A full disk and a run directory that is deleted: one error that names the file, exit code 1, a closed record."""

import contextlib
import errno
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import yaml
from tensorboard.summary.writer.record_writer import RecordWriter
from transformers import AutoTokenizer

from roll_core.config import load
from roll_core.errors import DataError, RunFileError
from roll_core.pipelines.sft import SFTPipeline
from roll_core.runtime.records.record import RunFacts, RunRecord, read_record
from roll_core.runtime.records.run_files import LineWriter, copy_lines
from roll_core.runtime.records.tracking import MetricsFile
from roll_core.runtime.run.loop import execute
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.errors import raises_error

FULL = Path("/dev/full")
"""Every write to it fails as on a full disk."""

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def full(*arguments, **keys):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_for(name, patch):
    """Files of that name cannot be written by `Path.write_text`."""
    write = Path.write_text

    def write_text(path, *arguments, **keys):
        return full() if name in path.name else write(path, *arguments, **keys)

    patch.setattr(Path, "write_text", write_text)


def export_part(strategy, path):
    (path / "config.json").write_text("{}")
    full()


def log_to_full(*arguments):
    with contextlib.closing(LineWriter(FULL)) as file:
        file.append({"step": 1})


FAULTS = {
    "log.txt": lambda patch: patch.setattr(logging.FileHandler, "_open", lambda handler: FULL.open("a")),
    "metrics.jsonl": lambda patch: patch.setattr(MetricsFile, "log", log_to_full),
    "tokenizer": lambda patch: patch.setattr("roll_core.runtime.run.loop.prepare_tokenizer", full),
    "tensorboard": lambda patch: patch.setattr(RecordWriter, "write", full),
    "export": lambda patch: patch.setattr(HFTrainStrategy, "export_model", export_part),
    "report.html": lambda patch: full_for(".report.html", patch),
}


@pytest.mark.parametrize("name", FAULTS)
def test_full_disk_ends_a_run_with_one_error_and_closed_record(local_runs, monkeypatch, capfd, name):
    config = local_runs.sft(max_steps=2, eval_steps=1, track_with=["tensorboard"])
    FAULTS[name](monkeypatch)
    result = local_runs.run(config)
    record = read_record(result.run_dir.record)
    if name == "report.html":  # the run itself is complete
        assert (result.outcome, record["outcome"]) == ("finished", "finished")
        assert "report.html" in local_runs.screen.getvalue()
        return
    assert isinstance(result.error, RunFileError)
    assert result.error.exit_code == 1
    assert (FULL.name if name == "metrics.jsonl" else name) in str(result.error)
    assert "output_dir" in str(result.error)
    assert (result.outcome, record["outcome"], record["error"]["type"]) == ("failed", "failed", "RunFileError")
    assert not result.run_dir.export.exists()
    assert not any("Traceback" in said for said in (local_runs.screen.getvalue(), *capfd.readouterr()))


def test_lines_that_cannot_be_copied_leave_no_file_behind(tmp_path, monkeypatch):
    history = tmp_path / "before.jsonl"
    history.write_text('{"step": 1}\n', encoding="utf-8")
    monkeypatch.setattr("roll_core.runtime.records.run_files.encode", full)
    with raises_error(RunFileError, "metrics.jsonl"):
        copy_lines(history, tmp_path / "metrics.jsonl", lambda row: row)
    assert list(tmp_path.iterdir()) == [history]


@pytest.mark.parametrize("name", ["config.yaml", "run.json"])
def test_disk_full_at_the_start_is_an_error_that_names_the_file(local_runs, monkeypatch, name):
    full_for(name, monkeypatch)
    with raises_error(RunFileError, name):
        local_runs.run(local_runs.sft())


def test_a_record_is_closed_in_the_space_that_it_has(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    facts = RunFacts(name="x/001", pipeline="sft", plugins=[{"package": f"plugin-{i}"} for i in range(20)])
    record = RunRecord(path, facts)
    size = path.stat().st_size
    full_for(".run.json", monkeypatch)
    with pytest.raises(RunFileError):
        record.update(executor="local")
    rows = [{"stage": f"stage {i}", "seconds": 1.0} for i in range(200)]
    assert record.finish(RunFileError("no space"), time_rows=rows) == "failed"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["outcome"], found["error"]["message"], len(found["plugins"])) == ("failed", "no space", 20)
    assert path.stat().st_size == size


@pytest.mark.parametrize("lost", ["", "metrics.jsonl", "log.txt", "config.yaml"])
def test_a_run_whose_files_are_deleted_fails(local_runs, monkeypatch, lost):
    step = SFTPipeline.step

    async def step_and_delete(pipeline, run):
        await step(pipeline, run)
        if run.step == 1:
            (run.dir / lost).unlink() if lost else shutil.rmtree(run.dir)

    monkeypatch.setattr(SFTPipeline, "step", step_and_delete)
    result = local_runs.run(local_runs.sft(max_steps=4, save_steps=1))
    assert isinstance(result.error, RunFileError)
    assert (result.outcome, result.steps_done, result.error.exit_code) == ("failed", 2, 1)
    assert lost in str(result.error)
    assert result.run_dir.path.exists() == bool(lost)
    if lost:
        assert read_record(result.run_dir.record)["outcome"] == "failed"


def run_with(runs, callback):
    path = runs.folder / "sft.yaml"
    path.write_text(yaml.safe_dump(runs.sft(max_steps=2)), encoding="utf-8")
    return execute(load(path, [], runs.registry), runs.registry, callbacks=[callback])


@pytest.mark.parametrize("deleted", ["tokenizer", "tokenizer/tokenizer.json"])
def test_a_tokenizer_that_vanishes_does_not_cost_the_export(local_runs, deleted):
    class Deletes:
        def roll_step_finished(self, run, step, metrics):
            place = run.dir / deleted
            shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)

    result = run_with(local_runs, Deletes())
    assert (result.outcome, result.exit_code) == ("finished", 0)
    assert AutoTokenizer.from_pretrained(result.run_dir.export)("12")["input_ids"] == [3, 4]


@pytest.mark.parametrize(("first_bad", "exit_code"), [(1, 2), (2, 1)])
def test_exit_code_2_means_that_nothing_was_trained(local_runs, monkeypatch, first_bad, exit_code):
    step = SFTPipeline.step

    async def fails(self, run):
        if run.step + 1 == first_bad:
            raise DataError("a row of the next epoch")
        await step(self, run)

    monkeypatch.setattr(SFTPipeline, "step", fails)
    result = local_runs.run(local_runs.sft(max_steps=2))
    assert (result.error.exit_code, result.exit_code) == (2, exit_code)
