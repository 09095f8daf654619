"""Trackers in real runs: closed at every end, and continued by a resumed run."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from roll_core.plugins.registry import load_registry

PLUGIN = Path(__file__).parent / "tracked.py"


def events_of(run: Path) -> list[str]:
    return json.loads((run / "trackers" / "recording.json").read_text(encoding="utf-8"))


def test_a_run_stopped_by_sigterm_closes_its_trackers_and_the_resumed_run_continues_them(
    local_runs, install, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(install(PLUGIN)))
    config = local_runs.rlvr(max_steps=10_000, track_with=["recording", "csv"])
    path = local_runs.folder / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "roll_core", "run", str(path)]
    process = subprocess.Popen(
        command, cwd=local_runs.folder, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
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
    assert events[-1] == "close RunPreemptedError"
    done = int(events[-2].removeprefix("step "))

    local_runs.registry = load_registry()
    result = local_runs.ok(config | {"max_steps": done + 1, "resume_from_checkpoint": True})
    second = events_of(result.run_dir.path)
    assert second[: len(events)] == events
    assert second[len(events) :] == ["open rlvr/002", f"step {done + 1}", "close NoneType"]
    with (result.run_dir.path / "metrics.csv").open(newline="") as stream:
        assert [int(row["step"]) for row in csv.DictReader(stream) if int(row["step"])] == list(range(1, done + 2))
