"""How runs end when they are stopped, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from roll_core.pipelines.rlvr import RLVRPipeline


def start(runs, config) -> subprocess.Popen:
    path = runs.folder / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "roll_core", "run", str(path)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.Popen(
        command, cwd=runs.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for_step(runs, process: subprocess.Popen, step: int, timeout_s: float = 200) -> Path:
    """The run's directory, once so many steps are recorded."""
    run = runs.folder / "output" / "rlvr" / "latest"
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        metrics = run / "metrics.jsonl"
        if metrics.is_file() and len(metrics.read_text(encoding="utf-8").splitlines()) >= step:
            return run.resolve()
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("the run did not begin")


def record_of(run: Path) -> dict:
    return json.loads((run / "run.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_stopped_run_says_so_and_exits_with_130(runs, number):
    if runs.executor == "ray" and number == signal.SIGINT:
        pytest.skip("shown on the local executor; SIGTERM takes the same way")
    process = start(runs, runs.rlvr(max_steps=10_000))
    run = wait_for_step(runs, process, 2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert record_of(run)["outcome"] == "interrupted"
    assert "interrupted" in output
    assert "Traceback" not in output
    assert (run / "report.html").is_file()
    assert psutil.wait_procs(children, timeout=15)[1] == []


@pytest.mark.on_ray
def test_a_killed_driver_leaves_no_process_behind(runs):
    process = start(runs, runs.rlvr(max_steps=10_000))
    wait_for_step(runs, process, 2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_a_killed_worker_ends_the_run_with_its_name(ray_runs, monkeypatch):
    step = RLVRPipeline.step

    async def step_with_an_accident(self, run):
        if run.step == 1:
            os.kill(run.infer_role("actor_infer").group.members[0].pid, signal.SIGKILL)
        await step(self, run)

    monkeypatch.setattr(RLVRPipeline, "step", step_with_an_accident)
    result = ray_runs.run(ray_runs.rlvr(max_steps=5))
    assert type(result.error).__name__ == "WorkerDiedError"
    assert "actor_infer rank 0" in str(result.error)
    assert result.steps_done == 1
    record = record_of(result.run_dir.path)
    assert record["outcome"] == "failed"
    assert record["guards"]["counts"] == {"dead_worker": 1}
