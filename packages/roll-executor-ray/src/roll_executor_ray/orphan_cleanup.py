"""Cleanup after the driver: a separate process that outlives the driver and cleans up if the driver could not.

    driver ──(pipe, its parent)── reaper, in its own session: neither Ctrl-C nor a killed process group ends it
       ╳                             └─► driver gone: kill every process with the run's mark, unlink its shared
                                         memory, remove its scratch directory

A process has the mark if it was started with `ROLL_INSTANCE=<mark>` in its environment, which children inherit. These
are the run's own Ray instance, its workers, and the processes that they started. Some of Ray's processes and those of
engines write their title over their environment. Ray's are recognized by the files that they have open in the run's
scratch directory, engines' by their parent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

MARK = "ROLL_INSTANCE"
"""Environment variable whose value identifies the executor that a process belongs to."""
SHM = Path("/dev/shm")
SEGMENTS = (
    *("psm_", "sem.mp-"),  # Python's SharedMemory and semaphores
    "torch_",
    *("sgl_shm_", "sglang_loads_"),  # SGLang
    *("vllm_ec_", "vllm_offload_", "VLLM_OBJECT_STORAGE_SHM_BUFFER_"),  # vLLM
)
"""Name prefixes of shared memory that its owner does not unlink if it is killed.

Processes may have mapped other files in `SHM`, such as a model that the user put there.
"""
LOCK = "in-use"
"""File in a scratch directory that the driver has locked."""
POLL_S = 0.5
KILL_S = 10.0
"""Seconds until the processes must be gone after SIGKILL."""
TRACKERS = ("resource_tracker", "torch_shm_manager")
"""Processes of Python and torch that unlink the shared memory of exited owners, and then exit by themselves."""
TRACKERS_S = 3.0
"""Seconds that the trackers have to exit by themselves."""


def shm_prefix(mark: str) -> str:
    """Name prefix of a run's shared memory. Segments that are left are unlinked at the end."""
    return f"roll-{mark}-"


def lock(scratch: Path) -> int:
    """Mark a scratch directory as in use until the returned descriptor is closed or this process exits."""
    descriptor = os.open(scratch / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def remove_abandoned(directory: Path) -> None:
    """Remove scratch directories of runs whose processes, the reaper included, were all killed at once."""
    for scratch in directory.glob(f"roll-{'[0-9a-f]' * 8}"):
        with contextlib.suppress(OSError):  # in use, of another user, or without a lock
            descriptor = os.open(scratch / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                sweep(scratch.name.removeprefix("roll-"), scratch)
            finally:
                os.close(descriptor)


def start_reaper(mark: str, scratch: Path) -> subprocess.Popen[bytes]:
    """Start a reaper for this process. End it with `stop_reaper`."""
    command = [sys.executable, "-m", __name__, mark, str(os.getpid()), str(scratch)]
    env = {name: value for name, value in os.environ.items() if name != MARK}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, env=env, cwd="/"
    )


def stop_reaper(reaper: subprocess.Popen[bytes]) -> None:
    """End the reaper after everything is cleaned up."""
    with contextlib.suppress(BrokenPipeError):
        reaper.communicate(b"done", timeout=KILL_S)


def sweep(mark: str, scratch: Path) -> int:
    """Kill processes with the mark, unlink their shared memory and remove the scratch directory.

    Returns the number of killed processes.
    """
    segments: set[str] = set()
    killed: set[int] = set()
    started = time.monotonic()
    while (alive := _marked(mark, scratch)) and (passed_s := time.monotonic() - started) < KILL_S:
        if passed_s < TRACKERS_S:
            alive = [process for process in alive if not _is_tracker(process)]
        for process in alive:  # before the first one is killed: engines exit with their worker
            segments.update(_mapped_segments(process))
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
            killed.add(process.pid)
        time.sleep(0.05)
    if SHM.is_dir():
        ours = {path.name for path in SHM.iterdir() if path.name.startswith(shm_prefix(mark))}
        for name in segments | ours:
            with contextlib.suppress(FileNotFoundError):
                (SHM / name).unlink()
    shutil.rmtree(scratch, ignore_errors=True)
    return len(killed)


def _marked(mark: str, scratch: Path) -> list[psutil.Process]:
    processes: set[psutil.Process] = set()
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark or _has_open(process, scratch):
                processes.update([process, *process.children(recursive=True)])
    return [process for process in processes if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _has_open(process: psutil.Process, directory: Path) -> bool:
    return "ray" in process.name() and any(Path(file.path).is_relative_to(directory) for file in process.open_files())


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(name in word for word in process.cmdline() for name in TRACKERS)
    return False


def _mapped_segments(process: psutil.Process) -> Iterable[str]:
    """Names of the shared memory that a process has mapped and that must be unlinked. Only on Linux."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.parent == SHM and path.name.startswith(SEGMENTS):
                yield path.name


def _wait_for_end_of(driver: int) -> bool:
    """Wait until the driver exits (True) or reports that it has cleaned up (False)."""
    stdin = sys.stdin.fileno()
    while True:
        readable, _, _ = select.select([stdin], [], [], POLL_S)
        if readable:
            return os.read(stdin, 16) != b"done"
        # A child that the driver forked may keep the pipe open. The driver's exit also changes our parent process.
        if os.getppid() != driver:
            return True


def main() -> None:
    """Entry point of the reaper process: `orphan_cleanup <mark> <driver's pid> <scratch directory>`."""
    mark, driver, scratch = sys.argv[1:]
    if _wait_for_end_of(int(driver)):
        sweep(mark, Path(scratch))


if __name__ == "__main__":
    main()
