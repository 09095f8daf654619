import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_core.errors import CheckpointError, NoCheckpointError, RunDirectoryError
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.run_dir import RunDir, experiment_runs, find_checkpoint
from roll_testing.errors import raises_error


def save(run: RunDir, step: int) -> Path:
    with CheckpointDirectory(run.checkpoints).writing(step, {"step": step}) as path:
        (path / "weights").write_bytes(bytes([step]) * 100)
    return run.checkpoints / f"step-{step}"


def test_runs_of_an_experiment_are_numbered(tmp_path: Path) -> None:
    names = [RunDir.create(tmp_path, "grpo").name for _ in range(3)]
    assert names == ["grpo/001", "grpo/002", "grpo/003"]
    assert RunDir.create(tmp_path, "sft").name == "sft/001"


def test_run_numbers_continue_after_gaps_and_three_digits(tmp_path: Path) -> None:
    (tmp_path / "x" / "999").mkdir(parents=True)
    (tmp_path / "x" / "notes").mkdir()
    assert RunDir.create(tmp_path, "x").path.name == "1000"
    assert [run.path.name for run in experiment_runs(tmp_path / "x")] == ["999", "1000"]


def test_latest_is_a_relative_link_to_the_newest_run(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "x")
    RunDir.create(tmp_path, "x")
    assert os.readlink(tmp_path / "x" / "latest") == "002"
    assert not list((tmp_path / "x").glob(".latest*"))


def test_a_file_system_without_links_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("links are not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    run = RunDir.create(tmp_path, "x")
    assert not (tmp_path / "x" / "latest").exists()
    assert experiment_runs(tmp_path / "x") == [run]


def test_processes_that_start_at_once_get_different_directories(tmp_path: Path) -> None:
    code = (
        "import sys; from roll_core.runtime.records.run_dir import RunDir;"
        "print(*[RunDir.create(sys.argv[1], 'x').path.name for _ in range(20)])"
    )
    racers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    names = [name for racer in racers for name in racer.communicate()[0].split()]
    assert sorted(names) == [f"{n:03d}" for n in range(1, 61)]


def test_an_output_dir_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with raises_error(RunDirectoryError, "output_dir") as caught:
        RunDir.create(tmp_path / "file", "x")
    assert caught.value.exit_code == 2


def test_resume_false_selects_no_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoint(False, output_dir=tmp_path, exp_name="x") is None


def test_resume_true_takes_the_newest_checkpoint_of_other_runs(tmp_path: Path) -> None:
    old, newer, current = (RunDir.create(tmp_path, "x") for _ in range(3))
    save(old, 30)
    save(newer, 5)
    save(newer, 10)
    save(current, 1)
    found = find_checkpoint(True, output_dir=tmp_path, exp_name="x", current=current)
    assert found is not None
    assert (found.step, found.path) == (10, newer.checkpoints / "step-10")


def test_resume_true_without_any_checkpoint_is_the_users_mistake(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "x")
    with raises_error(NoCheckpointError, "resume_from_checkpoint") as caught:
        find_checkpoint(True, output_dir=tmp_path, exp_name="x")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("place", ["x/001/checkpoints/step-4", "x/001/checkpoints", "x/001", "x/latest", "x"])
def test_resume_path_may_be_a_checkpoint_run_or_experiment(tmp_path: Path, place: str) -> None:
    run = RunDir.create(tmp_path, "x")
    save(run, 2)
    save(run, 4)
    found = find_checkpoint(str(tmp_path / place), output_dir="elsewhere", exp_name="y")
    assert found is not None
    assert found.step == 4
    assert json.loads((found.path / "state.json").read_text()) == {"step": 4}


def test_resume_from_damaged_checkpoint_names_file_and_good_one(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    save(run, 2)
    bad = save(run, 4)
    (bad / "weights").write_bytes(b"\4" * 99)
    with raises_error(CheckpointError, "99", "100", "step-2"):
        find_checkpoint(str(bad), output_dir=tmp_path, exp_name="x")


def test_resume_true_falls_back_to_an_older_run_if_all_damaged(tmp_path: Path) -> None:
    old, newer = RunDir.create(tmp_path, "x"), RunDir.create(tmp_path, "x")
    save(old, 2)
    (save(newer, 4) / "weights").unlink()
    found = find_checkpoint(True, output_dir=tmp_path, exp_name="x")
    assert found is not None
    assert found.path == old.checkpoints / "step-2"
    (old.checkpoints / "step-2" / "manifest.json").write_text(json.dumps({"step": 2}))
    with raises_error(CheckpointError, "step-4"):
        find_checkpoint(True, output_dir=tmp_path, exp_name="x")


def test_resume_path_without_checkpoints_is_a_user_error(tmp_path: Path) -> None:
    with raises_error(NoCheckpointError, "resume_from_checkpoint", tmp_path):
        find_checkpoint(str(tmp_path), output_dir=tmp_path, exp_name="x")
    with raises_error(NoCheckpointError, "resume_from_checkpoint", tmp_path / "gone"):
        find_checkpoint(str(tmp_path / "gone"), output_dir=tmp_path, exp_name="x")
