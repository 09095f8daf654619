"""Checkpoints that are written while the run continues: complete or absent, and with the state of the saved step."""

import errno
import os
import signal
import threading
from dataclasses import dataclass, field

import pytest

from roll_core.errors import CheckpointError, RunInterruptedError, WorkerError
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.manifest import verify
from roll_strategy_hf import train as hf
from roll_testing.errors import mentions

WAIT_S = 60.0
ASYNC = "sft_train.strategy_args.strategy_config={async_save_ckpt: true}"


@dataclass
class Writer:
    """Of the built-in strategy: says how many steps had begun whenever something is left to be written, and does what
    a test wants of it."""

    steps_begun: int = 0
    left: list[int] = field(default_factory=list)
    at_step: dict = field(default_factory=dict)
    """Called when the step of this number begins."""
    before: dict = field(default_factory=dict)
    """Called before what was left at this step is written."""


@pytest.fixture
def writer(monkeypatch):
    found = Writer()
    write, step = hf._write, hf.HFTrainStrategy.optimizer_step

    def writes(files, folder):
        if "weights.safetensors" in files:
            saved = int(folder.parents[1].name.removeprefix(".step-").partition(".")[0])
            found.left.append(saved)
            found.before.get(saved, lambda: None)()
        write(files, folder)

    def steps(strategy):
        found.steps_begun += 1
        found.at_step.get(found.steps_begun, lambda: None)()
        return step(strategy)

    monkeypatch.setattr(hf, "_write", writes)
    monkeypatch.setattr(hf.HFTrainStrategy, "optimizer_step", steps)
    return found


def until(event: threading.Event):
    def wait() -> None:
        if not event.wait(WAIT_S):
            raise TimeoutError("nobody let it go on")

    return wait


def names(run_dir):
    return sorted(path.name for path in run_dir.checkpoints.iterdir())


def test_steps_continue_during_a_checkpoint_without_changing_it(local_runs, writer):
    """The writer of step 2 waits for step 4; the files are those of a run that waits for its checkpoints."""
    at_once = local_runs.ok(local_runs.sft(save_steps=2, exp_name="at_once"))
    late, seen = threading.Event(), []

    def look() -> None:
        checkpoints = local_runs.folder / "output" / "aside" / "latest" / "checkpoints"
        seen.append([path.name for path in checkpoints.iterdir() if not path.name.startswith(".")])
        late.set()

    writer.steps_begun, writer.left = 0, []
    writer.before[2], writer.at_step[4] = until(late), look
    aside = local_runs.ok(local_runs.sft(save_steps=2, exp_name="aside"), ASYNC)
    assert seen == [[]]
    assert writer.left == [2, 4]
    assert names(aside.run_dir) == ["step-2", "step-4"]
    for name in names(aside.run_dir):
        assert verify(aside.run_dir.checkpoints / name) == []
        one, other = (run.run_dir.checkpoints / name / "sft_train" / "rank-0" for run in (at_once, aside))
        for file in ("weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"):
            assert (one / file).read_bytes() == (other / file).read_bytes()


def test_run_resumes_from_an_async_checkpoint(runs):
    straight = runs.ok(runs.sft(save_steps=2, exp_name="straight"), ASYNC)
    checkpoint = straight.run_dir.checkpoints / "step-2"
    resumed = runs.ok(runs.sft(resume_from_checkpoint=str(checkpoint)), ASYNC)
    assert runs.timeless(resumed) == runs.timeless(straight)


def test_writer_error_ends_the_next_step_and_keeps_checkpoints(local_runs, writer):
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer.before[2] = full
    result = local_runs.run(local_runs.sft(save_steps=1), ASYNC)
    assert isinstance(result.error, CheckpointError)
    assert mentions(str(result.error), "step 2")
    assert names(result.run_dir) == ["step-1"]
    assert verify(result.run_dir.checkpoints / "step-1") == []
    assert writer.steps_begun == 3


def test_an_error_of_the_writer_names_role_and_rank(local_runs, writer):
    def fails() -> None:
        raise RuntimeError("the disk is on fire")

    writer.before[4] = fails  # of the last step: nothing but the end of the run waits for it
    result = local_runs.run(local_runs.sft(save_steps=4), ASYNC)
    assert isinstance(result.error, WorkerError)
    assert "sft_train" in str(result.error)
    assert "rank 0" in str(result.error)
    assert mentions(str(result.error), "fire")
    assert names(result.run_dir) == []


def test_failed_step_leaves_the_previous_checkpoint_complete(local_runs, writer):
    failing = threading.Event()

    def fails() -> None:
        failing.set()
        raise RuntimeError("the step failed")

    writer.before[2], writer.at_step[3] = until(failing), fails
    result = local_runs.run(local_runs.sft(save_steps=2), ASYNC)
    assert mentions(str(result.error), "step")
    assert names(result.run_dir) == ["step-2"]
    assert verify(result.run_dir.checkpoints / "step-2") == []


def test_sigterm_waits_for_the_checkpoint_that_is_being_written(local_runs, writer):
    """It comes while step 2 is written and step 3 computes: step 3 is saved as well, and nothing after it begins."""
    stopping = threading.Event()

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        stopping.set()

    writer.before[2], writer.at_step[3] = until(stopping), stop
    result = local_runs.run(local_runs.sft(save_steps=2, max_steps=8), ASYNC)
    assert result.outcome == "preempted"
    assert mentions(str(result.error), "step 3")
    assert names(result.run_dir) == ["step-2", "step-3"]
    assert CheckpointDirectory(result.run_dir.checkpoints).latest_good().step == 3


def test_ctrl_c_does_not_wait_for_the_writer(local_runs, writer):
    forever = threading.Event()
    try:
        writer.before[2] = until(forever)
        writer.at_step[3] = lambda: os.kill(os.getpid(), signal.SIGINT)
        result = local_runs.run(local_runs.sft(save_steps=1), ASYNC)
        assert isinstance(result.error, RunInterruptedError)
        assert names(result.run_dir) == ["step-1"]
    finally:
        forever.set()
