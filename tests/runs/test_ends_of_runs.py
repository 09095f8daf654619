"""How runs end when they are stopped, and what they leave behind."""

import asyncio
import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from roll_core.cli.main import main
from roll_core.config import load
from roll_core.config.secrets import Redactor
from roll_core.errors import GuardTrippedError, UnsupportedError
from roll_core.pipelines.rlvr import RLVRPipeline
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.run_dir import RunDir
from roll_core.runtime.records.run_files import read_lines
from roll_core.runtime.run import summary
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.errors import mentions
from shared_tests.forked import Forked


def start(runs, config) -> Forked:
    """The run in a process group of its own, as a shell would start it."""
    path = runs.folder / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    output = runs.folder / "output.txt"
    return Forked(["roll_core", "run", str(path)], output=output, cwd=runs.folder, env=env, start_new_session=True)


def wait_for_step(runs, process: Forked, step: int, timeout_s: float = 200) -> Path:
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


def wait_for(condition: Callable[[], bool], process: Forked, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_worker_of_ray(process: psutil.Process) -> bool:
    try:
        return "ray::" in "".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def steps_of(checkpoints: Path, pattern: str) -> list[int]:
    """Of the checkpoints whose names match, `step-4` or what is to become one, `.step-4.tmp-1a2b`."""
    return [int(re.search(r"step-(\d+)", path.name)[1]) for path in checkpoints.glob(pattern)]


def test_run_stopped_by_ctrl_c_is_reported_and_exits_with_130(local_runs):
    runs = local_runs
    process = start(runs, runs.rlvr(max_steps=10_000))
    run = wait_for_step(runs, process, 2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert record_of(run)["outcome"] == "interrupted"
    assert "interrupted" in output
    assert "Traceback" not in output
    assert re.search(r"^resume .*save_steps", output, re.MULTILINE)
    assert (run / "report.html").is_file()
    assert {each["check"] for each in json.loads((run / "audit.json").read_text())} >= {"rows", "duplicates"}
    assert not (run / "checkpoints").exists()
    assert psutil.wait_procs(children, timeout=60)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "pause_s"),
    [
        ("local", 0.0),
        ("local", 0.3),
        pytest.param("ray", 0.0, marks=pytest.mark.ray),
        pytest.param("ray", 0.3, marks=pytest.mark.ray),
    ],
)
def test_a_second_ctrl_c_while_a_run_ends_changes_nothing(local_runs, executor, pause_s):
    process = start(local_runs, local_runs.rlvr(executor=executor, max_steps=10_000))
    run = wait_for_step(local_runs, process, 2)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    time.sleep(pause_s)
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert record_of(run)["outcome"] == "interrupted"
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_sigterm_saves_the_step_and_the_resumed_run_is_equal(runs):
    steady = runs.rlvr(eval_steps=2, validation={"data_args": {"file_name": str(runs.folder / "val.jsonl")}})
    steady["actor_train"]["training_args"] |= {"lr_scheduler_type": "constant"}
    process = start(runs, steady | {"max_steps": 10_000})
    run = wait_for_step(runs, process, 4)
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in children if is_worker_of_ray(child)]
    # As schedulers do it: everyone is told, the workers, too.
    os.killpg(process.pid, signal.SIGTERM)
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.terminate()
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 75, output
    assert mentions(output, "preempted:", "SIGTERM")
    assert "Traceback" not in output
    record = record_of(run)
    assert record["outcome"] == "preempted"
    assert psutil.wait_procs(children, timeout=60)[1] == []
    done = record["steps_done"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{done}"]
    command = f"roll-core run {runs.folder / 'run.yaml'} resume_from_checkpoint=true"
    assert re.search(rf"^resume +{re.escape(command)}  .*\b{done}\b", output, re.MULTILINE)

    resumed = runs.ok(steady | {"max_steps": done + 3, "resume_from_checkpoint": "auto"})
    assert json.loads(resumed.run_dir.record.read_text(encoding="utf-8"))["resumed_step"] == done
    whole = runs.ok(steady | {"max_steps": done + 3, "exp_name": "whole"})
    for one, other in zip(runs.timeless(resumed), runs.timeless(whole), strict=True):
        # A new engine is sent the weights once more.
        one, other = ({k: v for k, v in each.items() if not k.startswith("weight_sync")} for each in (one, other))
        assert one == other
    weights, expected = (load_file(each.run_dir.export / "model.safetensors") for each in (resumed, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("end", ["unsupported", "ctrl-c"])
def test_an_export_that_was_cut_short_is_removed(local_runs, monkeypatch, end):
    def export_part(strategy, path):
        (path / "config.json").write_text("{}", encoding="utf-8")
        if end == "unsupported":
            raise UnsupportedError("no export of this model")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # the driver has been cancelled, and this worker goes on
        path.mkdir(exist_ok=True)
        (path / "model.safetensors").write_bytes(b"")

    monkeypatch.setattr(HFTrainStrategy, "export_model", export_part)
    result = local_runs.run(local_runs.sft(max_steps=1, save_steps=0))
    assert result.outcome == ("failed" if end == "unsupported" else "interrupted")
    assert result.steps_done == 1
    assert not result.run_dir.export.exists()


def test_run_without_checkpoints_resumes_from_its_source(local_runs):
    """`resume_from_checkpoint=true` would not find it: it is in another experiment, or in a store."""
    path = local_runs.folder / "run.yaml"
    path.write_text(yaml.safe_dump(local_runs.sft(), sort_keys=False), encoding="utf-8")
    run = RunDir.create(local_runs.folder / "output", "sft")
    origin = "s3://bucket/elsewhere/001-0a0b0c0d/step-10"
    run.record.write_text(json.dumps({"outcome": "failed", "resumed_step": 10, "resumed_from": origin}))
    loaded, argv = load(path, [], local_runs.registry), ["roll-core", "resume_from_checkpoint=true", "seed=3"]
    ((_, before),) = summary.how_to_resume(loaded, argv, run, Redactor.of({}))
    command, _, note = before.partition("   ")
    assert shlex.split(command) == ["roll-core", "run", str(path), "seed=3", f"resume_from_checkpoint={origin}"]
    assert "10" in note
    with CheckpointDirectory(run.checkpoints).writing(11, {}):
        pass
    ((_, after),) = summary.how_to_resume(loaded, argv, run, Redactor.of({}))
    assert shlex.split(after.partition("   ")[0])[-1] == "resume_from_checkpoint=true"


@pytest.mark.parametrize("step", [2, 4], ids=["middle", "last"])
def test_evaluation_interrupted_by_sigterm_runs_after_resuming(local_runs, monkeypatch, step):
    runs, evaluate = local_runs, RLVRPipeline.evaluate
    config = runs.rlvr(
        max_steps=4, eval_steps=2, validation={"data_args": {"file_name": str(runs.folder / "val.jsonl")}}
    )

    async def stopped(pipeline, run):
        if run.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(3600)
        return await evaluate(pipeline, run)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(RLVRPipeline, "evaluate", stopped)
        first = runs.run(config)
    assert (first.outcome, first.steps_done, first.error.exit_code) == ("preempted", step, 75)
    assert signal.getsignal(signal.SIGTERM) == before
    resumed = runs.ok(config | {"resume_from_checkpoint": "auto"})
    whole = runs.ok(config | {"exp_name": "whole"})
    assert runs.timeless(resumed) == runs.timeless(whole)
    assert list(read_lines(resumed.run_dir.samples)) == list(read_lines(whole.run_dir.samples))
    weights, expected = (load_file(each.run_dir.export / "model.safetensors") for each in (resumed, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_work_after_the_last_checkpoint_is_done_by_the_next_run(local_runs, monkeypatch):
    runs = local_runs
    held_out = {"data_args": {"file_name": str(runs.folder / "val.jsonl")}}
    config = runs.sft(max_steps=4, save_steps=2, eval_steps=2, validation=held_out)

    def killed(worker, path):
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(HFTrainStrategy, "export_model", killed)
        first = runs.run(config)
    assert first.outcome == "failed"
    assert main(["checkpoint", "convert", str(first.run_dir.path), str(runs.folder / "converted")]) == 0
    second = runs.ok(config | {"resume_from_checkpoint": True})
    record = record_of(second.run_dir.path)
    assert (record["outcome"], record["resumed_step"], record["steps_done"]) == ("finished", 4, 4)
    assert second.run_dir.report.is_file()
    whole = runs.ok(config | {"exp_name": "whole"})
    assert runs.timeless(second) == runs.timeless(whole)
    assert second.metrics["val/loss"] == whole.metrics["val/loss"]
    expected = load_file(whole.run_dir.export / "model.safetensors")
    for folder in (second.run_dir.export, runs.folder / "converted"):
        weights = load_file(folder / "model.safetensors")
        assert all(torch.equal(weights[name], expected[name]) for name in expected)

    third = runs.run(config | {"resume_from_checkpoint": True})
    assert isinstance(third.error, GuardTrippedError)
    assert third.error.guard == "zero_steps"
    assert str(second.run_dir.path) in str(third.error)


def test_run_killed_while_saving_resumes_from_the_previous_save(local_runs):
    runs = local_runs
    config = runs.sft(save_steps=1, max_ckpt_to_keep=2)
    config["sft_train"]["training_args"] |= {"lr_scheduler_type": "constant"}
    process = start(runs, config | {"max_steps": 10_000})
    checkpoints = runs.folder / "output" / "sft" / "001" / "checkpoints"
    while max(saved := steps_of(checkpoints, ".step-*.tmp-*"), default=0) < 4:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.001)
    process.kill()
    process.communicate()
    # That very step, or a later one, where this process was so slow that the save was done before the kill.
    done = max(steps_of(checkpoints, "step-*"))
    assert done >= max(saved) - 1
    resumed = runs.ok(config | {"max_steps": done + 2, "resume_from_checkpoint": True})
    assert steps_of(checkpoints, ".step-*") == []
    assert record_of(resumed.run_dir.path)["resumed_step"] == done
    whole = runs.ok(config | {"max_steps": done + 2, "exp_name": "whole"})
    assert runs.timeless(resumed) == runs.timeless(whole)
    weights, expected = (load_file(each.run_dir.export / "model.safetensors") for each in (resumed, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("settings", "times", "says"),
    [
        ({}, 2, "stopped by a second SIGTERM"),
        ({"preemption_timeout": 1.0}, 1, "preemption_timeout = 1 s"),
        ({"preemption_timeout": 0.0}, 1, "preemption_timeout is 0"),
    ],
    ids=["second", "deadline", "off"],
)
def test_a_step_that_does_not_end_does_not_keep_sigterm_waiting(local_runs, settings, times, says):
    judges = {"digits": {"reward": "function", "function": "rollrewards:endless"}}
    process = start(local_runs, local_runs.rlvr(rewards=judges, **settings))
    wait_for((local_runs.folder / "judging").is_file, process)
    run = (local_runs.folder / "output" / "rlvr" / "latest").resolve()
    process.send_signal(signal.SIGTERM)
    if times == 2:
        wait_for(lambda: "SIGTERM: " in (run / "log.txt").read_text(encoding="utf-8"), process)
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert says in output
    assert record_of(run)["outcome"] == "interrupted"
    assert not (run / "checkpoints").exists()


@pytest.mark.on_ray
def test_a_killed_driver_leaves_no_process_behind(runs):
    process = start(runs, runs.rlvr(max_steps=10_000))
    wait_for_step(runs, process, 2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert psutil.wait_procs(children, timeout=60)[1] == []


@pytest.mark.slow(ci=True)
def test_a_killed_worker_ends_the_run_with_its_name(ray_runs, monkeypatch):
    step = RLVRPipeline.step

    async def step_with_an_accident(self, run):
        if run.step == 1:
            os.kill(run.train_role("actor_train").group.members[0].pid, signal.SIGKILL)
        await step(self, run)

    monkeypatch.setattr(RLVRPipeline, "step", step_with_an_accident)
    result = ray_runs.run(ray_runs.rlvr(max_steps=5))
    assert type(result.error).__name__ == "WorkerDiedError"
    assert "actor_train rank 0" in str(result.error)
    assert result.steps_done == 1
    record = record_of(result.run_dir.path)
    assert record["outcome"] == "failed"
    assert record["guards"]["counts"] == {"dead_worker": 1}


def test_memory_report_error_does_not_fail_a_finished_run(local_runs, monkeypatch):
    from roll_core.runtime.workers.train import TrainWorker

    def memory_use(worker):
        raise OSError("no such counter")

    monkeypatch.setattr(TrainWorker, "memory_use", memory_use)
    result = local_runs.ok(local_runs.sft())
    assert (result.run_dir.export / "config.json").is_file()
    assert record_of(result.run_dir.path)["memory"] is None
    assert mentions(result.run_dir.log.read_text(encoding="utf-8"), "counter")


@pytest.mark.parametrize(("ignored", "code"), [(False, 75), (True, 0)], ids=["closed", "nohup"])
def test_closed_terminal_saves_the_step_unless_sighup_is_ignored(local_runs, ignored, code):
    path = local_runs.folder / "run.yaml"
    steps = 12 if ignored else 10_000
    path.write_text(yaml.safe_dump(local_runs.rlvr(max_steps=steps, save_steps=0)), encoding="utf-8")
    ours, terminal = pty.openpty()
    process = Forked(
        ["roll_core", "run", str(path)],
        output=local_runs.folder / "output.txt",
        cwd=local_runs.folder,
        env=os.environ | {"TERM": "xterm"},
        terminal=terminal,
        ignored=[signal.SIGHUP] if ignored else [],
    )
    os.close(terminal)
    reader = threading.Thread(target=_read_until, args=(ours, local_runs.folder / "closing"))
    reader.start()
    run = wait_for_step(local_runs, process, 2)
    (local_runs.folder / "closing").touch()
    reader.join()  # closes the terminal
    assert process.wait(timeout=100) == code
    record = record_of(run)
    assert record["outcome"] == ("finished" if ignored else "preempted")
    if not ignored:
        assert "SIGHUP" in record["error"]["message"]
        assert steps_of(run / "checkpoints", "step-*") == [record["steps_done"]]
    assert (run / "report.html").is_file()


def _read_until(terminal: int, file: Path) -> None:
    while not file.exists():
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)
    os.close(terminal)
