"""Processes that end with the one that started them; without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from roll_infer_vllm.lifeline import OWNER, end_with_owner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM runs on Linux")
WAIT_S = 60.0

ENGINE = "from roll_infer_vllm.lifeline import end_with_owner; end_with_owner(); print('ready', flush=True); {rest}"
OWNER_PROGRAM = """
    import os, subprocess, sys, time
    from roll_infer_vllm.lifeline import owned
    child = subprocess.Popen(
        [sys.executable, "-c", sys.argv[1]], env=os.environ | owned(), stdout=subprocess.PIPE, start_new_session=True
    )
    child.stdout.readline()
    print(child.pid, flush=True)
    time.sleep(600)
"""


def gone(pid):
    """Whether it is, within a time that no test reaches unless it is not."""
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
def test_a_process_ends_with_its_owner_that_was_killed(busy):
    program = [sys.executable, "-c", textwrap.dedent(OWNER_PROGRAM), ENGINE.format(rest=busy)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as owner:
        pid = int(owner.stdout.readline())
        assert psutil.pid_exists(pid)
        owner.kill()
        assert gone(pid)


def test_a_process_whose_owner_is_gone_already_does_not_begin():
    with subprocess.Popen([sys.executable, "-c", ""]) as owner:
        pass
    program = [sys.executable, "-c", ENGINE.format(rest="raise SystemExit(3)")]
    done = subprocess.run(program, env={OWNER: str(owner.pid)}, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (-9, "")


def test_the_owner_itself_and_processes_without_one_go_on(monkeypatch):
    monkeypatch.delenv(OWNER, raising=False)
    end_with_owner()
    monkeypatch.setenv(OWNER, str(os.getpid()))
    end_with_owner()
    assert not [each for each in threading.enumerate() if each.name == "roll-lifeline"]
