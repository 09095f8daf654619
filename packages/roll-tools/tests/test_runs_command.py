"""`roll-core runs` and `roll-core watch`, on files as runs write them."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from roll_core.cli.main import main
from roll_core.errors import RunDirectoryError
from roll_core.runtime.records.record import RunFacts, RunRecord
from roll_core.runtime.records.run_dir import RunDir
from roll_core.runtime.records.tracking import MetricsFile
from roll_testing.errors import mentions, raises_error
from roll_tools import runs as command
from roll_tools.open_run import open_run
from roll_tools.runs import MetricsFollower
from roll_tools.saved_record import config_hash


def make_run(output: Path, name: str = "grpo", *, steps: int = 3, asked: int = 5) -> tuple[RunDir, RunRecord]:
    run = RunDir.create(output, name)
    run.config.write_text(f"pipeline: rlvr\nexp_name: {name}\noutput_dir: {output}\nseed: 1\n")
    record = RunRecord(run.record, RunFacts(name=run.name, pipeline="rlvr", steps_asked=asked))
    metrics = MetricsFile(run.metrics)
    for step in range(steps + 1):
        metrics.log(step, {"score/mean": step / 10} | ({"val/score/mean": step / 4} if step % 2 == 0 else {}))
    metrics.close()
    record.step(steps)
    record.update(steps_done=steps)
    return run, record


def listed(capsys: pytest.CaptureFixture[str], place: Path) -> dict[str, dict]:
    assert main(["runs", str(place), "--json"]) == 0
    return {"/".join(Path(row["run"]).parts[-2:]): row for row in json.loads(capsys.readouterr().out)}


def test_a_run_is_opened_by_its_path_its_experiment_or_latest(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "x")
    run = RunDir.create(tmp_path, "x")
    run.config.write_text("pipeline: sft\n")
    for path in (run.path, tmp_path / "x", tmp_path / "x" / "latest"):
        assert open_run(path).path == run.path
    with raises_error(RunDirectoryError, tmp_path, "run.json"):
        open_run(tmp_path)
    for place in (tmp_path / "nowhere", "~nowhere/x"):  # no user has that name
        with raises_error(RunDirectoryError, "nowhere"):
            open_run(place)


def test_runs_are_listed_with_state_step_and_newest_score(tmp_path, capsys):
    make_run(tmp_path)
    _, ended = make_run(tmp_path, steps=5)
    ended.finish()
    _, failed = make_run(tmp_path, "sft", steps=1)
    failed.finish(RuntimeError("boom"))
    _, stopped = make_run(tmp_path, "sft", steps=2)
    stopped.finish(KeyboardInterrupt())
    rows = listed(capsys, tmp_path)
    assert {name: row["state"] for name, row in rows.items()} == {
        "grpo/001": "running", "grpo/002": "finished", "sft/001": "failed", "sft/002": "interrupted",
    }  # fmt: skip
    assert [(row["step"], row["steps_asked"]) for row in rows.values()] == [(3, 5), (5, 5), (1, 5), (2, 5)]
    assert [row["score"] for row in rows.values()] == [0.5, 1.0, 0.0, 0.5]
    assert {row["metric"] for row in rows.values()} == {"val/score/mean"}
    assert set(listed(capsys, tmp_path / "sft")) == {"sft/001", "sft/002"}
    assert set(listed(capsys, tmp_path / "sft" / "001")) == {"sft/001"}
    assert main(["runs", str(tmp_path)]) == 0
    assert mentions(capsys.readouterr().out, "grpo/002", "finished", "5/5", "val/score/mean")


def test_run_without_process_is_killed_and_damaged_is_unknown(tmp_path, capsys):
    run, _ = make_run(tmp_path)
    record = json.loads(run.record.read_text())
    record["process"]["pid"] = 2**30
    run.record.write_text(json.dumps(record))
    damaged, _ = make_run(tmp_path)
    damaged.record.write_text('{"outcome": "fin')
    damaged.metrics.write_bytes(damaged.metrics.read_bytes() + b'{"step": 4, "sc')
    damaged.config.unlink()
    RunDir.create(tmp_path, "grpo")
    rows = listed(capsys, tmp_path)
    assert [row["state"] for row in rows.values()] == ["killed", "unknown", "unknown"]
    assert [row["step"] for row in rows.values()] == [3, 3, 0]
    assert [bool(row["config"]) for row in rows.values()] == [True, False, False]


def test_names_that_the_terminal_cannot_show_are_listed(tmp_path, monkeypatch):
    RunDir.create(tmp_path, "日本").config.write_text("seed: 1")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["runs", str(tmp_path)]) == 0
    assert b"??/001" in written.getvalue()


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path, capsys):
    make_run(tmp_path)
    (RunDir.create(tmp_path, "other").metrics).mkdir()  # root may read every file, but no directory
    rows = listed(capsys, tmp_path)
    assert {name: row["step"] for name, row in rows.items()} == {"grpo/001": 3, "other/001": 0}


@pytest.mark.parametrize("depth", [300, 900, 3_000, 100_000])
def test_a_deeply_nested_record_hides_no_other_run(tmp_path, capsys, depth, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the comparison is written there
    run, _ = make_run(tmp_path)
    other, _ = make_run(tmp_path, "other")
    nested = "[" * depth + "]" * depth
    text = other.record.read_text(encoding="utf-8").rstrip().removesuffix("}")
    other.record.write_text(f'{text}, "memory": {nested}, "error": {nested}, "x": {nested}}}', encoding="utf-8")
    (other.path / "audit.json").write_text(nested, encoding="utf-8")
    other.config.write_text(f"seed: {nested}\n", encoding="utf-8")
    with other.metrics.open("a", encoding="utf-8") as file:
        file.write(f'{{"step": 4, "x": {nested}}}\n')
    assert set(listed(capsys, tmp_path)) == {"grpo/001", "other/001"}
    assert main(["report", str(other.path)]) == 0
    assert main(["report", str(run.path), str(other.path)]) == 0


def test_the_hash_of_a_config_ignores_where_the_run_is_written(tmp_path):
    one, _ = make_run(tmp_path / "a", "one")
    two, _ = make_run(tmp_path / "b", "two")
    assert config_hash(one.config) == config_hash(two.config) != ""
    two.config.write_text(two.config.read_text().replace("seed: 1", "seed: 2"))
    assert config_hash(one.config) != config_hash(two.config)


def test_a_place_that_does_not_exist_is_a_users_error(tmp_path, capsys):
    assert main(["runs", str(tmp_path / "no")]) == 2
    assert main(["watch", str(tmp_path / "no")]) == 2
    assert mentions(capsys.readouterr().err, str(tmp_path / "no"))


def test_watching_a_finished_run_shows_last_steps_and_outcome(tmp_path, capsys):
    run, record = make_run(tmp_path, steps=40, asked=40)
    record.finish()
    assert main(["watch", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert mentions(shown, "step=40/40", "finished", "reward=4")
    assert "step=20/40" not in shown


def test_watching_a_failed_run_returns_1_with_its_error(tmp_path, capsys):
    run, record = make_run(tmp_path)
    record.finish(RuntimeError("boom"))
    assert main(["watch", str(run.experiment)]) == 1
    assert mentions(capsys.readouterr().out, "failed", "boom")


def test_watching_follows_a_run_until_it_ends(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "_POLL_S", 0.02)
    run, record = make_run(tmp_path)

    def work() -> None:
        metrics = MetricsFile(run.metrics)
        for step in (4, 5):
            time.sleep(0.1)
            metrics.log(step, {"score/mean": step / 10})
            record.step(step)
        metrics.close()
        record.finish()

    running = threading.Thread(target=work)
    running.start()
    assert main(["watch", str(run.path)]) == 0
    running.join()
    assert mentions(capsys.readouterr().out, "step=3/5", "step=4/5", "step=5/5", "finished")


def test_ctrl_c_ends_the_command_and_not_the_run(tmp_path, capsys, monkeypatch):
    run, _ = make_run(tmp_path)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", interrupted)
    before = run.record.read_bytes()
    assert main(["watch", str(run.path)]) == 0
    assert run.record.read_bytes() == before
    assert mentions(capsys.readouterr().out, "step=3/5", "grpo/001")


def test_the_run_whose_name_is_close_is_named(tmp_path, capsys):
    run, _ = make_run(tmp_path)
    for command_name in ("watch", "report"):
        assert main([command_name, str(run.path.parent / "01")]) == 2
        assert mentions(capsys.readouterr().err, RunDirectoryError.code, "001?")


def test_a_run_without_a_record_ends_the_command_with_an_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "_RECORD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(command, "_POLL_S", 0.02)
    run, _ = make_run(tmp_path)
    run.record.write_text("{")
    assert main(["watch", str(run.path)]) == 2
    captured = capsys.readouterr()
    assert mentions(captured.out, "reward=0.3")
    assert mentions(captured.err, "run.json")


def test_follower_returns_complete_lines_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert follower.new_rows() == []
    path.write_text('{"step": 1, "a": 1}\nbroken\n[]\n{"step": 2')
    assert [row["step"] for row in follower.new_rows()] == [1]
    with path.open("a") as stream:
        stream.write(', "a": "NaN"}\n')
    (row,) = follower.new_rows()
    assert row["step"] == 2
    assert row["a"] != row["a"]
    replaced = tmp_path / "new"
    replaced.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    replaced.replace(path)
    assert [row["step"] for row in follower.new_rows()] == [3]
    assert follower.new_rows() == []
