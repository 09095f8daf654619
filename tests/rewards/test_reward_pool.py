"""Judging processes: deadlines that hold, deaths that are told, and nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from roll_core.errors import RewardFailure
from roll_core.reward_pool import RewardPool
from roll_testing.errors import raises_error

TARGET = """
    import os, re, signal, subprocess, sys, time

    def prepare(options):
        def handle(act, value=None):
            if act == "echo":
                return value
            if act == "pid":
                time.sleep(value)
                return os.getpid()
            if act == "sleep":
                if value:
                    open(value, "w").close()
                time.sleep(600)
            if act == "meet":
                folder, num = value
                open(os.path.join(folder, str(os.getpid())), "w").close()
                patience = time.monotonic() + 30
                while len(os.listdir(folder)) < num and time.monotonic() < patience:
                    time.sleep(0.01)
                return os.getpid()
            if act == "c code":
                re.match(r"(a+)+$", "a" * 60 + "b")  # keeps Python's lock for longer than the universe has lasted
            if act == "bignum":
                return len(str(9 ** 9 ** 9 ** value))
            if act == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if act == "exit":
                sys.exit(3)
            if act == "hard exit":
                os._exit(4)
            if act == "raise":
                raise ValueError("no such unit")
            if act == "print":
                print("judged"), sys.stdout.flush()
                return "quiet"
            if act == "memory":
                return len(bytearray(value))
            if act == "ignore the alarm":
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
                return "ignored"
            if act == "start another":
                return subprocess.Popen(["sleep", "600"]).pid
            if act == "object":
                return object()
            if act == "fork":
                os.fork()
                return value
            if act == "forge":
                import json, socket, struct
                payload = json.dumps({"number": value, "pid": os.getpid(), "result": "forged"}).encode()
                os.write(int(sys.argv[1]), struct.pack("!I", len(payload)) + payload)
                return "right"
        return handle
"""


@pytest.fixture
def pool_of(user_module):
    pools = []

    def make(size=1, **options):
        pool = RewardPool(f"{user_module(TARGET)}:prepare", {}, size=size, start_timeout_s=60.0, **options)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


def gone(pid: int, within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def once_there(file: Path, act: Callable[[], None]) -> None:
    """In a thread of its own."""

    def wait() -> None:
        patience = time.monotonic() + 30
        while not file.exists() and time.monotonic() < patience:
            time.sleep(0.01)
        act()

    threading.Thread(target=wait).start()


@pytest.mark.parametrize(
    "value", ["", "Grüße, 世界 🎲", "\ud800", "x" * 3_000_000, {"a": [1, 2.5, None]}, '{"result": 1}']
)
def test_any_value_goes_there_and_back(pool_of, value):
    assert pool_of().call({"act": "echo", "value": value}, timeout_s=30) == value


@pytest.mark.parametrize("act", ["sleep", "c code"])
def test_a_hang_ends_at_the_deadline_and_the_next_job_is_done(pool_of, act):
    pool = pool_of()
    before = pool.call({"act": "pid", "value": 0}, timeout_s=30)
    with raises_error(RewardFailure, "0.3"):
        pool.call({"act": act}, timeout_s=0.3)
    assert gone(before)
    assert pool.call({"act": "echo", "value": 1}, timeout_s=30) == 1


def test_huge_number_ends_at_the_deadline(pool_of):
    with raises_error(RewardFailure, "0.3"):
        pool_of().call({"act": "bignum", "value": 9}, timeout_s=0.3)


@pytest.mark.parametrize(
    ("act", "facts"),
    [
        ("die", ("SIGKILL",)),
        ("hard exit", ("4",)),
        ("exit", ("SystemExit", "3")),
        ("raise", ("ValueError", ".py:33", "handle")),
        ("object", ("TypeError", "JSON")),
    ],
)
def test_failed_job_is_reported_and_the_next_one_runs(pool_of, act, facts):
    pool = pool_of()
    with raises_error(RewardFailure, *facts):
        pool.call({"act": act}, timeout_s=30)
    assert pool.call({"act": "echo", "value": 1}, timeout_s=30) == 1


def test_process_killed_between_jobs_is_replaced_silently(pool_of):
    pool = pool_of()
    pid = pool.call({"act": "pid", "value": 0}, timeout_s=30)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert pool.call({"act": "pid", "value": 0}, timeout_s=30) != pid


def test_process_killed_in_a_job_fails_only_that_job(pool_of, tmp_path):
    pool = pool_of()
    pid = pool.call({"act": "pid", "value": 0}, timeout_s=30)
    begun = tmp_path / "begun"
    once_there(begun, lambda: os.kill(pid, signal.SIGKILL))
    with raises_error(RewardFailure, "SIGKILL"):
        pool.call({"act": "sleep", "value": str(begun)}, timeout_s=60)
    assert pool.call({"act": "echo", "value": 1}, timeout_s=30) == 1


def test_output_of_a_judge_does_not_reach_the_run_output(pool_of, capfd):
    assert pool_of().call({"act": "print"}, timeout_s=30) == "quiet"
    out, err = capfd.readouterr()
    assert out == ""
    assert "judged" in err


def test_every_caller_gets_its_own_answer(pool_of):
    pool = pool_of(size=3)
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda i: pool.call({"act": "echo", "value": i}, timeout_s=60), range(300)))
    assert answers == list(range(300))


def test_the_pool_grows_while_jobs_wait_and_not_beyond_its_size(pool_of, tmp_path):
    pool = pool_of(size=2)
    (here := tmp_path / "here").mkdir()
    with ThreadPoolExecutor(4) as threads:
        pids = list(threads.map(lambda _: pool.call({"act": "meet", "value": [str(here), 2]}, timeout_s=60), range(8)))
    assert len(set(pids)) == 2


def test_jobs_share_processes_if_no_more_can_start(pool_of, monkeypatch, caplog):
    pool = pool_of(size=4)
    first = pool.call({"act": "pid", "value": 0}, timeout_s=60)

    def refuse(*args, **options):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with ThreadPoolExecutor(4) as threads:
        pids = list(threads.map(lambda _: pool.call({"act": "pid", "value": 0.3}, timeout_s=60), range(4)))
    assert set(pids) == {first}
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_quick_jobs_one_after_the_other_take_one_process(pool_of):
    pool = pool_of(size=4)
    assert len({pool.call({"act": "pid", "value": 0}, timeout_s=60) for _ in range(20)}) == 1


def test_memory_is_limited_and_the_failure_names_the_limit(pool_of):
    pool = pool_of(memory_mb=1024)
    with raises_error(RewardFailure, "MemoryError", "memory_limit_mb", "1024"):
        pool.call({"act": "memory", "value": 4 << 30}, timeout_s=60)
    assert pool.call({"act": "memory", "value": 10}, timeout_s=60) == 10


def test_forked_job_does_not_change_results_of_later_jobs(pool_of):
    pool = pool_of()
    for number in range(20):
        assert pool.call({"act": "fork", "value": number}, timeout_s=60) == number
        assert pool.call({"act": "echo", "value": -number}, timeout_s=60) == -number


def test_reply_to_another_job_is_refused_and_ends_its_process(pool_of):
    pool = pool_of()
    assert pool.call({"act": "echo", "value": 1}, timeout_s=60) == 1  # job 0
    with raises_error(RewardFailure, "pid"):
        pool.call({"act": "forge", "value": 2}, timeout_s=60)  # job 1, which replies to job 2 first
    assert pool.call({"act": "echo", "value": 2}, timeout_s=60) == 2


def test_unloadable_target_is_reported_at_the_start(user_module):
    pool = RewardPool(f"{user_module('raise OSError(5)')}:prepare", {}, size=1, start_timeout_s=60.0)
    with raises_error(RewardFailure, "OSError: 5", ".py:1"):
        pool.start(wait=True)
    pool.close()


def test_target_that_loads_too_slowly_is_reported(user_module):
    pool = RewardPool(f"{user_module('import time; time.sleep(600)')}:prepare", {}, size=1, start_timeout_s=0.5)
    with raises_error(RewardFailure, "0.5"):
        pool.start(wait=True)
    pool.close()


def test_closing_ends_calls_that_are_under_way(pool_of, tmp_path):
    pool = pool_of()
    pid = pool.call({"act": "pid", "value": 0}, timeout_s=30)
    begun = tmp_path / "begun"
    once_there(begun, pool.close)
    with pytest.raises(RewardFailure):
        pool.call({"act": "sleep", "value": str(begun)}, timeout_s=60)
    assert gone(pid)
    with raises_error(RewardFailure, "closed"):
        pool.call({"act": "echo"}, timeout_s=60)


def test_closing_wakes_those_that_wait_for_a_process(pool_of):
    pool = pool_of()
    pool.start(wait=True)
    threading.Timer(0.5, pool.close).start()
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(pool.call, {"act": "sleep"}, 60) for _ in range(3)]
    assert all(isinstance(call.exception(), RewardFailure) for call in calls)


def test_closing_twice_or_before_the_start_is_no_error(pool_of):
    pool = pool_of()
    pool.close()
    pool.close()
    with raises_error(RewardFailure, "closed"):
        pool.call({"act": "echo"}, timeout_s=60)


def test_child_process_of_a_judge_is_killed_on_close(pool_of):
    pool = pool_of()
    pid = pool.call({"act": "start another"}, timeout_s=30)
    assert psutil.pid_exists(pid)
    pool.close()
    assert gone(pid)


@pytest.mark.parametrize("busy_with", ["echo", "sleep", "c code"])
def test_reward_processes_exit_with_a_killed_parent(user_module, tmp_path, busy_with):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        from roll_core.reward_pool import RewardPool
        pool = RewardPool("{user_module(TARGET)}:prepare", {{}}, size=1, start_timeout_s=60.0)
        print(pool.call({{"act": "pid", "value": 0}}, 60), flush=True)
        pool.call({{"act": "{busy_with}"}}, 5.0)
        input()
        """)
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path.cwd(), text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        assert psutil.pid_exists(pid)
        parent.kill()
    assert gone(pid)
