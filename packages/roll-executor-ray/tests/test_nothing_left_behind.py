"""After success, error, Ctrl-C, SIGTERM, SIGKILL, a lost Ray: no process, memory, Ray or file of a run is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from roll_executor_ray import instance, orphan_cleanup

HERE = Path(__file__).parent
WORKERS = HERE.parents[2] / "tests" / "executors"
PATIENCE_S = 90


class Driver:
    """A driver in a process group of its own, as a shell would start it. What it starts bears a tag."""

    def __init__(self, *ends: str) -> None:
        self.tag = uuid4().hex
        env = os.environ | {"ROLL_TEST_TAG": self.tag, "PYTHONPATH": str(WORKERS), "PYTHONWARNINGS": "error"}
        env.pop("RAY_ADDRESS", None)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "driver.py"), *ends],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.litter = Litter(json.loads(line)) if line.startswith("{") else None
        assert self.litter is not None, (line, self.process.communicate()[1])

    def end(self) -> tuple[str, str]:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return out, err

    def left_behind(self) -> list[str]:
        """Waits for what is going away."""
        assert self.litter is not None
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = self.litter.left() + [str(each) for each in processes_with("ROLL_TEST_TAG", self.tag)]
            if not found:
                return []
            time.sleep(0.1)
        return found


class Litter:
    """What the workers of a run left lying about, and the run's own files."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.pids = [pid for worker, child, *_ in told["litter"] for pid in (worker, child)]
        self.segments = [name for _, _, *segments in told["litter"] for name in segments]
        self.mark = self.segments[1].split("-")[1]

    def left(self) -> list[str]:
        found = [f"process {pid}" for pid in self.pids if alive(pid)]
        found += [f"/dev/shm/{name}" for name in self.segments if (orphan_cleanup.SHM / name).exists()]
        return found + [str(path) for path in Path(tempfile.gettempdir()).glob(f"roll-{self.mark}*")]


def processes_with(name: str, value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.ray
@pytest.mark.slow
def test_after_success_and_then_after_an_error() -> None:
    driver = Driver("success", "error")
    out, err = driver.end()
    assert driver.process.returncode == 0, err
    second, error = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    assert "no_such_method failed: AttributeError" in error["error"], err
    assert driver.left_behind() == []
    assert Litter(second).left() == []


@pytest.mark.ray
@pytest.mark.slow
def test_after_ctrl_c_while_workers_are_busy() -> None:
    driver = Driver("wait")
    os.killpg(driver.process.pid, signal.SIGINT)
    _, err = driver.end()
    assert "KeyboardInterrupt" in err
    assert driver.left_behind() == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="shared memory has no names outside Linux")
def test_after_sigkill_of_the_driver() -> None:
    driver = Driver("wait")
    driver.process.kill()
    driver.end()
    assert driver.left_behind() == []


@pytest.mark.ray
@pytest.mark.slow
def test_after_the_control_service_of_ray_was_killed() -> None:
    """Ray's own library ends the driver 60 s later, without an exception."""
    driver = Driver("gcs")
    out, err = driver.end()
    assert driver.process.returncode == 0, err
    assert json.loads(out)["code"] == "ROLL-X001"
    assert driver.left_behind() == []


# -- the reaper alone


def start_marked(mark: str, command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=os.environ | {orphan_cleanup.MARK: mark}, start_new_session=True)


def test_sweep_ends_what_bears_the_mark_and_nothing_else(tmp_path: Path) -> None:
    ours, mark = start_marked("mark1", ["sleep", "600"]), "mark1"
    others = start_marked("mark2", ["sleep", "600"])
    scratch = tmp_path / "scratch"
    (scratch / "ray").mkdir(parents=True)
    try:
        assert orphan_cleanup.sweep(mark, scratch) == 1
        assert ours.wait(PATIENCE_S) == -signal.SIGKILL
        assert others.poll() is None
        assert not scratch.exists()
    finally:
        for process in (ours, others):
            process.kill()
            process.wait()


@pytest.mark.skipif(not orphan_cleanup.SHM.is_dir(), reason="shared memory has no names here")
def test_sweep_unlinks_shared_memory_of_the_run_and_nothing_else(tmp_path: Path) -> None:
    ours, others = (
        orphan_cleanup.SHM / f"{orphan_cleanup.shm_prefix('mark3')}w",
        orphan_cleanup.SHM / f"{orphan_cleanup.shm_prefix('mark33')}w",
    )
    try:
        for path in (ours, others):
            path.write_bytes(b"x")
        orphan_cleanup.sweep("mark3", tmp_path / "none")
        assert (ours.exists(), others.exists()) == (False, True)
    finally:
        for path in (ours, others):
            path.unlink(missing_ok=True)


SHARING = """
import mmap, sys, time
segments = []
for name in sys.argv[1:]:
    with open(f"/dev/shm/{name}", "x+b") as file:
        file.truncate(16)
        segments.append(mmap.mmap(file.fileno(), 16))
print("ready", flush=True)
time.sleep(600)
"""
WITHOUT_MARK = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:], env={})"]
"""Starts a process whose environment cannot be read, as that of a process that writes its title over it."""
OF_ENGINES = (
    "psm_",
    "sem.mp-",
    "torch_",
    "sgl_shm_",
    "sglang_loads_",
    "vllm_ec_",
    "vllm_offload_",
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_",
)


@pytest.mark.skipif(not orphan_cleanup.SHM.is_dir(), reason="shared memory has no names here")
def test_sweep_unlinks_shared_memory_but_no_user_file(tmp_path: Path) -> None:
    """The engine's process has mapped both: users keep models in /dev/shm. Another run's engine has its own."""
    here, there = uuid4().hex, uuid4().hex
    engines: list[psutil.Process] = []
    runs: list[subprocess.Popen[bytes]] = []
    try:
        for mark, names in (
            ("mark6", [*(f"{prefix}{here}" for prefix in OF_ENGINES), f"model_{here}"]),
            ("mark7", [f"sglang_loads_{there}"]),
        ):
            env = os.environ | {orphan_cleanup.MARK: mark}
            command = [*WITHOUT_MARK, sys.executable, "-c", SHARING, *names]
            run = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
            runs.append(run)
            assert run.stdout is not None
            assert run.stdout.readline() == b"ready\n"
            engines += psutil.Process(run.pid).children()
        assert orphan_cleanup.sweep("mark6", tmp_path / "none") == 2
        left = {path.name for path in orphan_cleanup.SHM.iterdir() if here in path.name or there in path.name}
        assert left == {f"model_{here}", f"sglang_loads_{there}"}
        assert [alive(engine.pid) for engine in engines] == [False, True]
    finally:
        for process in (*engines, *runs):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for run in runs:
            run.communicate()
        for path in orphan_cleanup.SHM.iterdir():
            if here in path.name or there in path.name:
                path.unlink()


def test_reaper_ends_when_it_is_dismissed_and_touches_nothing(tmp_path: Path) -> None:
    process = orphan_cleanup.start_reaper("mark4", tmp_path)
    orphan_cleanup.stop_reaper(process)
    assert process.returncode == 0
    assert tmp_path.exists()


def test_reaper_sweeps_when_its_driver_vanishes(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = (
        "import os, sys; from pathlib import Path; from roll_executor_ray import orphan_cleanup;"
        "orphan_cleanup.start_reaper('mark5', Path(sys.argv[1])); os._exit(1)"
    )
    marked = start_marked("mark5", ["sleep", "600"])
    try:
        subprocess.run([sys.executable, "-c", code, str(scratch)], check=False)
        assert marked.wait(PATIENCE_S) == -signal.SIGKILL
    finally:
        marked.kill()
        marked.wait()


def test_scratch_directories_of_killed_runs_are_removed(tmp_path: Path) -> None:
    killed, used, foreign = (tmp_path / f"roll-{digit * 8}" for digit in "abc")
    for path in (killed, used, foreign, tmp_path / "roll-notes"):
        path.mkdir()
    code = f"import os, pathlib; from roll_executor_ray.orphan_cleanup import lock; lock(pathlib.Path({str(killed)!r}))"
    subprocess.run([sys.executable, "-c", f"{code}; os.kill(os.getpid(), 9)"], check=False)
    descriptor = orphan_cleanup.lock(used)
    try:
        orphan_cleanup.remove_abandoned(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["roll-bbbbbbbb", "roll-cccccccc", "roll-notes"]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("length", range(20, 45, 4))
def test_sockets_fit_below_any_temporary_directory(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/" + "t" * (length - 1))
    scratch = instance._scratch_directory("0" * 8)
    assert len(f"{scratch}/ray/session_2026-11-28_23-59-59_999999_1234567/sockets/plasma_store") <= 107
