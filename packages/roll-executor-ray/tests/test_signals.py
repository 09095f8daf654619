"""SIGTERM ends only the driver."""

import signal
import subprocess
import sys
import time

import pytest

from roll_executor_ray.instance import stop_signals_blocked_in_children
from roll_testing.errors import raises_error

SLEEPER = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"]
WITH_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
child.terminate()
time.sleep(0.5)
found = child.poll()
child.kill()
child.wait()
print("ready", found, flush=True)  # last: whoever reads it kills this process
"""
HOST = """
import os, subprocess, sys, threading, time
from roll_core.runtime.cluster.executors.worker_main import ignore_stop_signals

def work():  # not in the main thread, as in Ray's processes
    ignore_stop_signals()
    inner = threading.Thread(target=lambda: ended.append(child_after_sigterm()))
    inner.start()
    inner.join()

def child_after_sigterm():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    child.terminate()
    return child.wait(timeout=30)

ended = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
print("ready", *ended, flush=True)
time.sleep(600)
"""


def started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def survives_sigterm(process: subprocess.Popen[str]) -> bool:
    process.terminate()
    time.sleep(0.5)
    return process.poll() is None


@pytest.fixture
def processes():
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


def test_only_new_children_ignore_stop_signals(processes):
    with stop_signals_blocked_in_children():
        processes.append(started(SLEEPER))
    processes.append(started(SLEEPER))
    assert [says(process) for process in processes] == ["ready", "ready"]
    assert survives_sigterm(processes[0])
    processes[1].terminate()
    assert processes[1].wait(30) == -signal.SIGTERM


def test_grandchildren_inherit_the_block(processes):
    with stop_signals_blocked_in_children():
        processes.append(started([sys.executable, "-c", WITH_CHILD]))
    assert says(processes[0]) == "ready None"


def test_the_mask_of_this_thread_is_as_before():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    with raises_error(ValueError, "inside"), stop_signals_blocked_in_children():
        raise ValueError("inside")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before


@pytest.mark.parametrize("blocked", [True, False])
def test_a_worker_ignores_sigterm_but_its_children_do_not(processes, blocked):
    """The block is inherited from a private Ray, but not from the user's."""
    if blocked:
        with stop_signals_blocked_in_children():
            processes.append(started([sys.executable, "-c", HOST]))
    else:
        processes.append(started([sys.executable, "-c", HOST]))
    assert says(processes[0]) == f"ready {-signal.SIGTERM}"
    assert survives_sigterm(processes[0])
