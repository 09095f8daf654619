"""Trackers in real runs: closed at every end, and continued by a resumed run."""

from __future__ import annotations

import csv
import json
import re
import signal
import time
from pathlib import Path

import pytest
import yaml

from roll_core.errors import NonFiniteError, TrackerError
from roll_core.plugins.registry import load_registry
from roll_core.runtime.records.record import read_record
from roll_testing.errors import mentions
from shared_tests.forked import Forked

PLUGIN = Path(__file__).parent / "tracked.py"
FILES = "config.yaml report.html samples.jsonl"


def events_of(run: Path) -> list[str]:
    return json.loads((run / "trackers" / "recording.json").read_text(encoding="utf-8"))


def test_sigterm_closes_trackers_and_the_resumed_run_continues(local_runs, install, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(install(PLUGIN)))
    config = local_runs.rlvr(max_steps=10_000, track_with=["recording", "csv"])
    path = local_runs.folder / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    process = Forked(["roll_core", "run", str(path)], output=local_runs.folder / "output.txt")
    first = local_runs.folder / "output" / "rlvr" / "001"
    deadline = time.monotonic() + 200
    while not (first / "metrics.csv").is_file() or "step 2" not in events_of(first):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    events = events_of(first)
    assert events[-2:] == [f"failed with {FILES}", "close"]
    done = int(events[-3].removeprefix("step "))

    local_runs.registry = load_registry()
    result = local_runs.ok(config | {"max_steps": done + 1, "resume_from_checkpoint": True})
    second = events_of(result.run_dir.path)
    assert second[: len(events)] == events
    assert second[len(events) :] == ["open rlvr/002", f"step {done + 1}", f"finished with {FILES}", "close"]
    with (result.run_dir.path / "metrics.csv").open(newline="") as stream:
        assert [int(row["step"]) for row in csv.DictReader(stream) if int(row["step"])] == list(range(1, done + 2))


def test_trackers_get_the_stages_of_a_run_within_its_steps(local_runs, install, monkeypatch):
    monkeypatch.syspath_prepend(str(install(PLUGIN)))
    local_runs.registry = load_registry()
    result = local_runs.ok(local_runs.rlvr(max_steps=2, save_steps=1, track_with=["recording"]))
    stages = json.loads((result.run_dir.path / "trackers" / "stages.json").read_text(encoding="utf-8"))
    assert stages.count("/step") == 2
    for inner in ("rollout", "train"):
        assert stages.count(f"/step/{inner}") == 2
    assert {stage.split("/")[1] for stage in stages} >= {"step", "checkpoint", "export"}
    assert all(f"time/{name}" in row for row in result.history for name in ("rollout", "train", "step"))


def test_trackers_get_every_nth_step_evaluations_and_the_last(local_runs):
    config = local_runs.sft(max_steps=8, eval_steps=3, logging_steps=5, track_with=["csv"])
    result = local_runs.ok(config)
    with (result.run_dir.path / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(int(row["step"]), bool(row["val/loss"])) for row in rows] == [
        (0, True), (3, True), (5, False), (6, True), (8, True),
    ]  # fmt: skip
    lines = re.findall(r"^step=(\d)/8 loss=", local_runs.screen.getvalue(), re.MULTILINE)
    assert lines == ["3", "5", "6", "8"]
    assert [row["step"] for row in result.history] == list(range(9))


@pytest.mark.parametrize("breaks", ["log", "close", "stage"])
def test_tracker_error_names_its_package_and_fails_the_run(local_runs, install, monkeypatch, breaks):
    monkeypatch.syspath_prepend(str(install(PLUGIN)))
    local_runs.registry = load_registry()
    config = local_runs.sft(max_steps=2, track_with=["csv", "recording"])
    result = local_runs.run(config | {"tracker_kwargs": {"recording": {"breaks": breaks}}})
    assert isinstance(result.error, TrackerError)
    assert mentions(str(result.error), "recording", "roll-tracked", "ConnectionError")
    record = read_record(result.run_dir.record)
    assert (record["outcome"], record["error"]["code"]) == ("failed", "ROLL-P009")
    assert "ConnectionError" in result.run_dir.report.read_text(encoding="utf-8")
    assert events_of(result.run_dir.path)[-1] == "close"
    with (result.run_dir.path / "metrics.csv").open(newline="") as stream:
        assert {row["step"] for row in csv.DictReader(stream)} == {str(int(row["step"])) for row in result.history}


def test_crashed_run_is_failed_in_trackers_and_keeps_its_error(local_runs, install, monkeypatch):
    monkeypatch.syspath_prepend(str(install(PLUGIN)))
    local_runs.registry = load_registry()
    secret = "9f3c1c7e5d6b4a21"
    monkeypatch.setenv("SOME_API_KEY", secret)
    config = local_runs.sft(max_steps=2, track_with=["recording"])
    config["tracker_kwargs"] = {"recording": {"breaks": "close", "api_key": secret, "notes": f"by {secret}"}}
    config["sft_train"]["training_args"]["learning_rate"] = 1e30
    result = local_runs.run(config)
    assert isinstance(result.error, NonFiniteError), result.error
    assert events_of(result.run_dir.path)[-2].startswith("failed with config.yaml report.html")
    assert secret not in (result.run_dir.path / "trackers" / "config.json").read_text()
