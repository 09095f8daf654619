import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roll_core.config.secrets import REDACTED, Redactor
from roll_core.errors import RollError, RunInterruptedError, RunPreemptedError, WorkerDiedError
from roll_core.runtime.records.guards import GuardEvent
from roll_core.runtime.records.provenance import git_state, requirements, versions
from roll_core.runtime.records.record import RunFacts, RunRecord, read_record
from roll_tools.saved_record import is_abandoned

FACTS = RunFacts(
    name="grpo/001",
    pipeline="rlvr",
    seed=7,
    argv=("roll-core", "run", "grpo.yaml", "judge.api_key=hunter2hunter2"),
    plugins=(
        {"package": "roll-core", "version": "0.1.0", "hook_api": 1},
        {"package": "roll-executor-ray", "version": "0.1.0", "hook_api": 1},
    ),
    steps_asked=10,
)


def test_running_run_has_a_complete_record(tmp_path: Path) -> None:
    RunRecord(tmp_path / "run.json", FACTS)
    record = read_record(tmp_path / "run.json")
    assert (record["outcome"], record["ended"], record["error"]) == ("running", None, None)
    assert record["plugins"] == list(FACTS.plugins)
    assert record["versions"]["python"] == platform.python_version()
    for name in ("torch", "transformers", "ray", "roll-core"):
        assert record["versions"][name] == importlib.metadata.version(name)
    assert record["host"]["cores"] >= 1
    assert record["host"]["memory_bytes"] > 2**20
    assert record["process"]["pid"] == os.getpid()
    assert not is_abandoned(record)
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "finished"),
        (RunInterruptedError("stopped by SIGTERM"), "interrupted"),
        (RunPreemptedError("stopped by SIGTERM; step 4 is saved"), "preempted"),
        (KeyboardInterrupt(), "interrupted"),
        (WorkerDiedError("actor_infer", 1, "node-3", "generate", "signal 9"), "failed"),
        (ValueError("größer"), "failed"),
    ],
)
def test_the_end_is_recorded_with_its_cause(tmp_path: Path, error: BaseException | None, outcome: str) -> None:
    record = RunRecord(tmp_path / "run.json", FACTS)
    record.step(4)
    rows = [{"stage": "train", "seconds": 1.5, "share": 1.0, "entries": 4, "tokens": 0}]
    assert record.finish(error, time_rows=rows) == outcome
    read = read_record(tmp_path / "run.json")
    assert (read["outcome"], read["steps_done"], read["time"]) == (outcome, 4, rows)
    assert read["ended"] >= read["started"]
    code = {"code": error.code} if isinstance(error, RollError) else {}
    assert read["error"] == (None if error is None else {"type": type(error).__name__, "message": str(error)} | code)


def test_secrets_reach_the_record_nowhere(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "run.json", FACTS, Redactor.of({"api_key": "hunter2hunter2"}))
    record.update(platform="cpu", note={"token": "another5ecret"})
    record.finish(RuntimeError("401 for https://me:pw@host with hunter2hunter2"))
    text = (tmp_path / "run.json").read_text()
    assert "hunter2" not in text
    assert "another5ecret" not in text
    assert "me:pw" not in text
    assert read_record(tmp_path / "run.json")["argv"][-1] == f"judge.api_key={REDACTED}"


def test_record_is_updated_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    record = RunRecord(tmp_path / "run.json", FACTS)
    found = []
    for step, at in enumerate((10.1, 11.2, 11.3, 12.5), start=1):
        now[0] = at
        record.step(step)
        found.append(read_record(tmp_path / "run.json")["steps_done"])
    assert found == [0, 2, 2, 4]


def test_guard_events_are_counted_and_first_stretches_stored(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "run.json", FACTS)
    for step in range(50):
        since = step - step % 2
        record.guard_event(
            GuardEvent(guard="logprob_gap", action="warn", message=f"gap {step}", step=step, time=1.0, since=since)
        )
    guards = read_record(tmp_path / "run.json")["guards"]
    assert guards["counts"] == {"logprob_gap": 50}
    assert [(each["since"], each["step"], each["message"]) for each in guards["events"]] == [
        (step, step + 1, f"gap {step + 1}") for step in range(0, 40, 2)
    ]


def test_numbers_that_are_none_are_still_json(tmp_path: Path) -> None:
    RunRecord(tmp_path / "run.json", FACTS).update(last=float("nan"))
    assert json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)["last"] == "NaN"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_a_record_that_cannot_be_read_is_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    assert read_record(tmp_path / "run.json") == {}
    assert read_record(tmp_path / "gone.json") == {}


def test_killed_run_is_recognised_by_its_process(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from roll_core.runtime.records.record import RunFacts, RunRecord
RunRecord(Path(sys.argv[1]), RunFacts(name="x/001", pipeline="sft"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run.json")], check=False)
    record = read_record(tmp_path / "run.json")
    assert record["outcome"] == "running"
    assert is_abandoned(record)
    assert not is_abandoned({**record, "host": {**record["host"], "name": "another-host"}})
    assert not is_abandoned({**record, "outcome": "finished"})
    recycled = {**record, "process": {**record["process"], "pid": os.getpid()}}
    assert is_abandoned({**recycled, "process": {"pid": os.getpid(), "created": 1.0}})


def test_git_state_has_commit_branch_and_dirty_flag(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q", "-b", "work")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-q", "-m", "x")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "branch": "work", "dirty": False}
    (tmp_path / "f").write_text("2")
    state = git_state(tmp_path)
    assert state is not None
    assert state["dirty"] is True


def test_versions_follow_the_path_and_unparsable_requirements(tmp_path, monkeypatch):
    for version in ("1.0", "2.0"):
        info = tmp_path / version / f"acme_parts-{version}.dist-info"
        info.mkdir(parents=True)
        required = "Requires-Dist: acme.core[fast] >=1\nRequires-Dist: other (not a version\nRequires-Dist: @\n"
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-parts\nVersion: {version}\n{required}")
    for version in ("1.0", "2.0", "1.0"):
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / version)
            assert versions(["acme-parts"])["acme-parts"] == version
            assert requirements("acme-parts") == ("acme.core", "other")
    assert "acme-parts" not in versions(["acme-parts"])
    assert requirements("acme-parts") == ()
