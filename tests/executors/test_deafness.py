"""Who is ended by SIGTERM, and who is not."""

import signal
import subprocess
import sys
import time

import pytest

from roll_core.runtime.cluster.executors.sigterm_mask import children_deaf_to
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
import os, signal, subprocess, sys, threading, time
from roll_core.runtime.cluster.executors.sigterm_mask import be_deaf_to

def work():  # not in the main thread, as in Ray's processes
    be_deaf_to(signal.SIGTERM)
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


def test_children_are_deaf_only_if_they_were_started_meanwhile(processes):
    with children_deaf_to(signal.SIGTERM):
        processes.append(started(SLEEPER))
    processes.append(started(SLEEPER))
    assert [says(process) for process in processes] == ["ready", "ready"]
    assert survives_sigterm(processes[0])
    processes[1].terminate()
    assert processes[1].wait(30) == -signal.SIGTERM


def test_what_deaf_children_start_is_deaf_too(processes):
    with children_deaf_to(signal.SIGTERM):
        processes.append(started([sys.executable, "-c", WITH_CHILD]))
    assert says(processes[0]) == "ready None"


def test_the_mask_of_this_thread_is_as_before():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    with raises_error(ValueError, "inside"), children_deaf_to(signal.SIGTERM):
        raise ValueError("inside")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before


@pytest.mark.parametrize("born_deaf", [True, False])
def test_a_worker_is_deaf_but_what_it_starts_is_not(processes, born_deaf):
    """Born deaf in a Ray of our own, else in the user's."""
    if born_deaf:
        with children_deaf_to(signal.SIGTERM):
            processes.append(started([sys.executable, "-c", HOST]))
    else:
        processes.append(started([sys.executable, "-c", HOST]))
    assert says(processes[0]) == f"ready {-signal.SIGTERM}"
    assert survives_sigterm(processes[0])
