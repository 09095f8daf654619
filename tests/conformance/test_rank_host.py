"""Ranks: results in order, first causes, deadlines, and no process left behind."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import pytest

from roll_testing import RankHost, RanksFailedError
from roll_testing.errors import raises_error

FUNCTIONS = """
import os, signal, subprocess, sys, time

def place(rank, *arguments):
    return rank, os.getpid(), arguments, os.environ.get("COLOUR")

def fail(rank, which):
    print("about to fail")
    if rank == which:
        raise LookupError("nothing here")
    time.sleep(100)

def die(rank, how):
    if rank == 1:
        os.kill(os.getpid(), getattr(signal, how)) if how != "exit" else os._exit(7)
    time.sleep(100)

def hang_in_a_place_of_its_own(rank):
    if rank == 1:
        time.sleep(100)
    return rank

def start_a_child(rank, file):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    open(file, "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(100)

def return_what_cannot_travel(rank):
    return lambda: None
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """A module that ranks can import."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "rank_functions.py").write_text(FUNCTIONS, encoding="utf-8")
    sys.path.insert(0, str(folder))
    import rank_functions

    yield rank_functions
    sys.path.remove(str(folder))
    del sys.modules["rank_functions"]


@pytest.fixture(scope="module")
def host(functions):
    host = RankHost(environment={"COLOUR": "green"}, preload=["json"])
    yield host
    host.close()


def gone(process_id: int) -> bool:
    """Within a few seconds."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not psutil.pid_exists(process_id) or psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_every_rank_is_a_separate_process(host, functions):
    found = host.run(functions.place, "a", 3, num_ranks=3)
    assert [(rank, arguments, colour) for rank, _, arguments, colour in found] == [
        (rank, ("a", 3), "green") for rank in range(3)
    ]
    processes = {process for _, process, _, _ in found}
    assert len(processes | {os.getpid()}) == 4
    assert all(gone(process) for process in processes)


def test_failed_rank_is_named_and_does_not_block_the_others(host, functions):
    began = time.monotonic()
    with raises_error(RanksFailedError, "rank 1", "LookupError", "about"):
        host.run(functions.fail, 1, num_ranks=3, timeout_s=60)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("how", "facts"), [("SIGKILL", ("SIGKILL",)), ("SIGSEGV", ("SIGSEGV",)), ("exit", ("7",))])
def test_killed_rank_is_named(host, functions, how, facts):
    with raises_error(RanksFailedError, "rank 1", *facts):
        host.run(functions.die, how, num_ranks=2)


def test_a_rank_that_hangs_is_named_with_the_place(host, functions):
    with raises_error(RanksFailedError, "rank 1", "4", "0", "hang_in_a_place_of_its_own"):
        host.run(functions.hang_in_a_place_of_its_own, num_ranks=2, timeout_s=4)


def test_processes_started_by_a_rank_end_with_it(host, functions, tmp_path):
    file = tmp_path / "ids"
    with raises_error(RanksFailedError, "rank 0", "8"):
        host.run(functions.start_a_child, str(file), timeout_s=8)
    assert all(gone(int(each)) for each in file.read_text().split())


def test_a_result_that_cannot_travel_is_an_error_of_the_rank(host, functions):
    with raises_error(RanksFailedError, "rank 0"):
        host.run(functions.return_what_cannot_travel)


def test_host_continues_after_failures(host, functions):
    with pytest.raises(RanksFailedError):
        host.run(functions.fail, 0)
    assert host.run(functions.place)[0][0] == 0


def test_killed_host_kills_its_ranks_and_restarts(functions, tmp_path):
    host = RankHost()
    host.run(functions.place)
    file = tmp_path / "ids"
    import threading

    def kill_once_it_runs():
        while not file.exists() or " " not in file.read_text():
            time.sleep(0.05)
        os.kill(host._process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_once_it_runs)
    killer.start()
    with raises_error(RanksFailedError, "EOFError"):
        host.run(functions.start_a_child, str(file), timeout_s=60)
    killer.join()
    assert gone(int(file.read_text().split()[0]))
    os.kill(int(file.read_text().split()[1]), signal.SIGKILL)
    assert host.run(functions.place)[0][0] == 0
    host.close()


def test_a_preload_that_cannot_be_imported_is_named():
    with raises_error(RanksFailedError, "no_such_module", "ModuleNotFoundError"):
        RankHost(preload=["no_such_module"]).run(print)
