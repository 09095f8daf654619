"""`roll-core checkpoint list | verify`: what is shown, and the exit codes."""

import json
import threading
from dataclasses import asdict, replace

import pytest

from roll_core.cli import main as cli
from roll_core.errors import NoCheckpointError, RunDirectoryError
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.run_dir import RunDir
from roll_core.runtime.run.checkpoint_store import RemoteFolder
from roll_core.runtime.run.run_saver import SavedRole, SavedRun
from roll_testing.errors import mentions

SAVED = SavedRun(
    pipeline="rlvr",
    pipeline_state={},
    roles={
        "actor_train": SavedRole(strategy="hf_train", world_size=2, weight_version=7),
        "critic": SavedRole(strategy="acme_train", world_size=1, weight_version=8),
    },
)


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of 3000 bytes of weights after steps 2 and 4."""
    made = RunDir.create(tmp_path, "x")
    made.record.write_text("{}")
    for step in (2, 4):
        save(made, step)
    return made


def save(run, step):
    with CheckpointDirectory(run.checkpoints).writing(step, asdict(SAVED)) as path:
        (path / "actor_train").mkdir()
        (path / "actor_train" / "weights").write_bytes(bytes(3000))


def weights(run, step):
    return run.checkpoints / f"step-{step}" / "actor_train" / "weights"


def listed(capsys, *arguments):
    code = cli.main(["checkpoint", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_list_shows_step_size_and_roles_of_a_checkpoint(run, capsys):
    assert cli.main(["checkpoint", "list", str(run.path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["checkpoint", "step", "written", "size"]
    assert [line.split()[1] for line in lines] == ["2", "4"]
    for line in lines:
        assert "rlvr: actor_train hf_train × 2, critic acme_train × 1" in line
        assert line.endswith("complete")


def test_list_as_json_has_the_same_facts(run, capsys):
    code, rows = listed(capsys, "list", str(run.path))
    assert code == 0
    assert [row["step"] for row in rows] == [2, 4]
    row = rows[-1]
    assert row["path"] == str(run.checkpoints / "step-4")
    state = (run.checkpoints / "step-4" / "state.json").stat().st_size
    assert row["size_bytes"] == 3000 + state
    assert row["created"] == pytest.approx((run.checkpoints / "step-4" / "manifest.json").stat().st_mtime, abs=5)
    assert (row["pipeline"], row["state"], row["problems"], row["digests_read"]) == ("rlvr", "complete", [], False)
    assert row["roles"]["actor_train"] == {
        "strategy": "hf_train",
        "world_size": 2,
        "weight_version": 7,
        "portable": False,
    }


def test_list_of_an_experiment_shows_all_of_its_runs(run, tmp_path, capsys):
    later = RunDir.create(tmp_path, "x")
    save(later, 6)
    _, rows = listed(capsys, "list", str(tmp_path / "x"))
    assert [row["step"] for row in rows] == [2, 4, 6]
    _, rows = listed(capsys, "list", str(run.checkpoints))
    assert [row["step"] for row in rows] == [2, 4]


def test_run_without_checkpoints_lists_nothing_but_fails_verify(tmp_path, capsys):
    run = RunDir.create(tmp_path, "x")
    run.record.write_text("{}")
    assert cli.main(["checkpoint", "list", str(run.path)]) == 0
    assert "no checkpoint in" in capsys.readouterr().out
    assert cli.main(["checkpoint", "verify", str(run.path)]) == 2
    assert mentions(capsys.readouterr().err, NoCheckpointError.code, run.path)


def test_a_truncated_file_is_seen_by_list(run, capsys):
    weights(run, 4).write_bytes(bytes(2999))
    assert cli.main(["checkpoint", "list", str(run.path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("complete")
    assert lines[2].endswith("damaged: actor_train/weights has 2999 bytes instead of 3000")


def test_flipped_bit_is_detected_by_verify_and_list_on_request(run, capsys):
    weights(run, 4).write_bytes(bytes(1500) + b"\1" + bytes(1499))
    assert cli.main(["checkpoint", "list", str(run.path)]) == 0
    assert cli.main(["checkpoint", "list", str(run.path), "--verify"]) == 1
    assert mentions(capsys.readouterr().out, "actor_train/weights")
    assert cli.main(["checkpoint", "verify", str(run.path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("step-2: intact")
    assert lines[1].endswith("step-4: damaged: actor_train/weights does not have the digest that was recorded")
    assert lines[2] == f"newest intact checkpoint in {run.checkpoints}: step-2"


def test_verify_takes_checkpoints_by_their_own_paths(run, capsys):
    weights(run, 4).unlink()
    assert cli.main(["checkpoint", "verify", str(run.checkpoints / "step-2")]) == 0
    assert cli.main(["checkpoint", "verify", str(run.checkpoints / "step-4")]) == 1
    shown = capsys.readouterr().out
    assert "actor_train/weights is missing" in shown
    assert "step-2" in shown.splitlines()[-1]
    places = [str(run.checkpoints / f"step-{step}") for step in (2, 4)]
    assert listed(capsys, "verify", places[0], "--json", places[1]) == listed(capsys, "verify", *places)
    code, rows = listed(capsys, "verify", *places)
    assert code == 1
    assert [row["state"] for row in rows] == ["intact", "damaged: actor_train/weights is missing"]


@pytest.mark.parametrize("file", ["manifest.json", "state.json"])
def test_checkpoint_without_its_files_is_shown_as_damaged(run, file, capsys):
    (run.checkpoints / "step-4" / file).unlink()
    for action in ("list", "verify"):
        code, rows = listed(capsys, action, str(run.path))
        assert code == 1
        assert rows[1]["problems"] == [f"{file} is missing"]
    weights(run, 2).unlink()
    assert cli.main(["checkpoint", "verify", str(run.path)]) == 1
    assert mentions(capsys.readouterr().out, run.checkpoints)


def test_a_renamed_checkpoint_is_found_out(run, capsys):
    (run.checkpoints / "step-4").rename(run.checkpoints / "step-40")
    code, rows = listed(capsys, "list", str(run.path))
    assert code == 1
    assert rows[1]["problems"] == ["it is the checkpoint of step 4 by its manifest.json"]


def test_copies_in_a_store_are_listed_and_verified(run, tmp_path, capsys):
    url = f"file://{tmp_path}/store/x/001-0a0b0c0d"
    for checkpoint in CheckpointDirectory(run.checkpoints).list():
        RemoteFolder(url, {}).put_checkpoint(checkpoint.path, threading.Event())
    code, rows = listed(capsys, "list", f"file://{tmp_path}/store/x")
    assert code == 0
    assert [(row["path"], row["step"], row["state"]) for row in rows] == [
        (f"file://{tmp_path}/store/x/001-0a0b0c0d/step-{step}", step, "complete") for step in (2, 4)
    ]
    assert rows[0]["roles"]["actor_train"]["world_size"] == 2
    code, of_store = listed(capsys, "list", f"file://{tmp_path}/store")
    assert (code, [row["path"] for row in of_store]) == (0, [row["path"] for row in rows])
    (tmp_path / "store" / "x" / "001-0a0b0c0d" / "step-4" / "actor_train" / "weights").write_bytes(b"1" * 3000)
    assert cli.main(["checkpoint", "verify", url]) == 1
    shown = capsys.readouterr().out
    assert mentions(shown, f"{url}/step-4", "actor_train/weights")
    assert shown.endswith(f": {url}/step-2\n")
    assert cli.main(["checkpoint", "verify", f"{url}/step-2"]) == 0
    assert cli.main(["checkpoint", "list", f"file://{tmp_path}/nothing"]) == 2
    assert mentions(capsys.readouterr().err, NoCheckpointError.code)


def test_the_best_copy_of_each_run_in_a_store_is_marked(run, tmp_path, capsys):
    """Although the disk that the run names is gone."""
    url = f"file://{tmp_path}/store/x"
    gone = tmp_path / "gone" / "step-2"
    best = {"metric": "val/score/mean", "mode": "max", "value": 0.75, "step": 2, "path": str(gone)}
    with CheckpointDirectory(run.checkpoints).writing(6, asdict(replace(SAVED, best=best))) as path:
        (path / "actor_train").mkdir()
    for copy in ("001-0a", "002-0b"):
        for checkpoint in CheckpointDirectory(run.checkpoints).list()[: 3 if copy == "001-0a" else 2]:
            RemoteFolder(f"{url}/{copy}", {}).put_checkpoint(checkpoint.path, threading.Event())
    code, rows = listed(capsys, "list", url)
    assert code == 0
    assert {row["path"].removeprefix(url): row["best"] for row in rows if row["best"]} == {
        "/001-0a/step-2": {"metric": "val/score/mean", "value": 0.75}
    }
    _, rows = listed(capsys, "list", f"{url}/001-0a")
    assert [bool(row["best"]) for row in rows] == [True, False, False]


def test_storage_options_reach_the_file_system_of_a_store(run, tmp_path, monkeypatch, capsys):
    found = []

    class Recorded(RemoteFolder):
        def __init__(self, url, options):
            found.append(options)
            super().__init__(url, {})

    monkeypatch.setattr("roll_core.runtime.run.checkpoint_store.RemoteFolder", Recorded)
    url = f"file://{tmp_path}/store/x/001-0a"
    for checkpoint in CheckpointDirectory(run.checkpoints).list():
        RemoteFolder(url, {}).put_checkpoint(checkpoint.path, threading.Event())
    words = ["--storage-option", "anon=true", "--storage-option", "client_kwargs={endpoint_url: 'http://h:1'}"]
    for action in ("list", "verify"):
        code, rows = listed(capsys, action, url, *words)
        assert (code, [row["step"] for row in rows]) == (0, [2, 4])
    assert found == [{"anon": True, "client_kwargs": {"endpoint_url": "http://h:1"}}] * 2
    capsys.readouterr()
    assert cli.main(["checkpoint", "list", "memory://x", "--storage-option", "anon"]) == 2
    assert "ROLL-C025 anon" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["list", "verify"])
def test_a_path_that_is_no_run_is_a_mistake(tmp_path, action, capsys):
    assert cli.main(["checkpoint", action, str(tmp_path)]) == 2
    assert mentions(capsys.readouterr().err, RunDirectoryError.code, tmp_path)
    assert cli.main(["checkpoint", action, str(tmp_path / "nowhere")]) == 2
    assert "is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["verify"], ["convert", "x"]])
def test_half_a_command_is_a_mistake(words):
    with pytest.raises(SystemExit) as ended:
        cli.main(["checkpoint", *words])
    assert ended.value.code == 2
