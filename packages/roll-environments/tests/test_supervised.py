"""Supervised commands: they have time to stop, and never outlive the process that asked for them."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil

from roll_environments.openenv_adapter import _stop
from roll_environments.supervised import supervised

if TYPE_CHECKING:
    from pathlib import Path

SERVER = """
import signal, sys, time
from pathlib import Path

log = Path(sys.argv[1])

def stop(*_):
    time.sleep(0.5)
    log.write_text("stopped")
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
log.write_text("started")
time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
from roll_environments.supervised import supervised

subprocess.Popen(supervised([sys.executable, "-c", sys.argv[1], sys.argv[2]]))
time.sleep(600)
"""


def wait_for(condition: object, what: str) -> None:
    end = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_a_server_has_time_to_stop(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = subprocess.Popen(supervised([sys.executable, "-c", SERVER, str(log)]), start_new_session=True)
    wait_for(lambda: log.exists() and log.read_text() == "started", "it starts")
    _stop(server)
    assert log.read_text() == "stopped"
    assert server.returncode == 0


def test_a_command_is_killed_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, SERVER, str(log)])
    wait_for(lambda: log.exists() and log.read_text() == "started", "it starts")
    started = psutil.Process(parent.pid).children(recursive=True)
    assert len(started) == 2
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(each.is_running() and each.status() != "zombie" for each in started), "they end")
