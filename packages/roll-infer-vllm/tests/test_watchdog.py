"""Engine processes exit with the worker that started them; without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from roll_infer_vllm.watchdog import PARENT, exit_with_parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM runs on Linux")
WAIT_S = 60.0

ENGINE = "from roll_infer_vllm.watchdog import exit_with_parent; exit_with_parent(); print('ready', flush=True); {rest}"
PARENT_PROGRAM = """
    import os, subprocess, sys, time
    from roll_infer_vllm.watchdog import PARENT
    environment = os.environ | {PARENT: str(os.getpid())}
    child = subprocess.Popen(
        [sys.executable, "-c", sys.argv[1]], env=environment, stdout=subprocess.PIPE, start_new_session=True
    )
    child.stdout.readline()
    print(child.pid, flush=True)
    time.sleep(600)
"""


def gone(pid):
    """True if the process exits within `WAIT_S`."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    psutil.Process(pid).kill()
    return False


@pytest.mark.parametrize("busy", ["import time; time.sleep(600)", "exec('while 1: pass')"], ids=["idle", "busy"])
def test_a_process_exits_when_its_parent_is_killed(busy):
    program = [sys.executable, "-c", textwrap.dedent(PARENT_PROGRAM), ENGINE.format(rest=busy)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
        assert gone(pid)


def test_a_process_whose_parent_has_exited_does_not_start():
    with subprocess.Popen([sys.executable, "-c", ""]) as parent:
        pass
    program = [sys.executable, "-c", ENGINE.format(rest="raise SystemExit(3)")]
    done = subprocess.run(
        program, env={PARENT: str(parent.pid)}, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (-9, "")


def test_an_orderly_exit_scans_nothing():
    """Handlers run in the opposite order: the number is read after all objects were frozen."""
    program = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000)); "
    for parent, frozen in ((os.getpid(), "True"), (0, "False")):
        done = subprocess.run(
            [sys.executable, "-c", program + ENGINE.format(rest="")],
            env={**os.environ, PARENT: str(parent)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.split() == ["ready", frozen]


def test_the_parent_and_processes_without_one_are_not_watched(monkeypatch):
    monkeypatch.delenv(PARENT, raising=False)
    exit_with_parent()
    monkeypatch.setenv(PARENT, str(os.getpid()))
    exit_with_parent()
    assert not [each for each in threading.enumerate() if each.name == "roll-watchdog"]
