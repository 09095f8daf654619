"""Processes as `python -m MODULE` starts them, forked from one that has imported torch, transformers and ROLL.

Importing takes 6 of the 8 CPU seconds of a short run. Environment, working directory, module path, standard streams,
session and signals are those of a new process. What Python and libraries read once, when they are loaded, is that of
the server: `OMP_NUM_THREADS` and the like, which are therefore compared.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch._inductor.config",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.optimization",
    "hydra",
    "hydra.utils",
    "roll_core.cli.run",
    "roll_core.runtime.run.loop",
    "roll_core.runtime.workers.train",
    "roll_core.runtime.workers.infer",
    "roll_core.pipelines.rlvr",
    "roll_core.pipelines.sft",
    "roll_core.runtime.cluster.executors.worker_main",
    "roll_strategy_hf.train",
    "roll_infer_hf.engine",
)
AT_LOADING = ("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "HF_HOME", "PYTHONUTF8")
"""Variables that are read when Python or a library is loaded."""


class Forked:
    """`subprocess.Popen([sys.executable, "-m", *words])` with both outputs in one file, from a warm server."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        output: Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        pass_fds: Sequence[int] = (),
        terminal: int | None = None,
        ignored: Sequence[int] = (),
    ) -> None:
        """`terminal`: file descriptor of the terminal of a new session, instead of both outputs in a file. The process
        then heeds SIGHUP, even if this one ignores it.

        `ignored`: numbers of signals that the process ignores from its start, as under `nohup`.
        """
        self.output = output
        self.returncode: int | None = None
        asked = {
            "words": list(words),
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "session": start_new_session or terminal is not None,
            "fds": list(pass_fds),
            "terminal": terminal is not None,
            "ignored": list(ignored),
        }
        self._state, theirs = os.pipe()
        with output.open("wb") as file, open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno(), file.fileno()] if terminal is None else [terminal, terminal]
            fds = [theirs, *streams, *pass_fds]
            _server().ask(asked, fds)
        os.close(theirs)
        self.pid = int(self._read(60))

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = int(self._read(timeout))
            os.close(self._state)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self.output.read_text(encoding="utf-8", errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout: float | None) -> bytes:
        if not select.select([self._state], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        line = b""
        while not line.endswith(b"\n"):
            part = os.read(self._state, 1)
            assert part, "the server of forked processes has exited"
            line += part
        return line


def run(
    words: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a forked process. Its `stdout` has both outputs."""
    with tempfile.TemporaryDirectory() as folder:
        process = Forked(words, output=Path(folder) / "output.txt", cwd=cwd, env=env)
        try:
            output, _ = process.communicate(timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(list(words), process.wait(), stdout=output)


@cache
def _server() -> Server:
    return Server()


class Server:
    """Ends with the process that started it, whose end of the socket then closes."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self.process = subprocess.Popen(command, env=self.env, pass_fds=(theirs.fileno(),))
        atexit.register(self.close)

    def close(self) -> None:
        self.socket.close()
        self.process.wait()

    def ask(self, asked: Mapping[str, Any], fds: Sequence[int]) -> None:
        for name in AT_LOADING:
            assert asked["env"].get(name) == self.env.get(name), f"{name} is read before the fork"
        socket.send_fds(self.socket, [json.dumps(asked).encode()], fds)


# -- in the server -----------------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request. Returns the request in that process, None in the others at their end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the keepers
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 16)
        if not message:
            return None
        if os.fork() == 0:
            control.close()
            return keep(json.loads(message), fds)
        for fd in fds:
            os.close(fd)


def keep(asked: dict[str, Any], fds: list[int]) -> dict[str, Any] | None:
    """Start the process, and write its pid and, when it has ended, its code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # signals of a terminal or to a process group are for the process alone
    state, *streams = fds
    pid = os.fork()
    if pid == 0:
        os.close(state)
        become(asked, streams)
        return asked
    for fd in streams:
        os.close(fd)
    os.write(state, b"%d\n" % pid)
    with suppress(OSError):
        os.write(state, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def become(asked: dict[str, Any], streams: list[int]) -> None:
    """Take over what a new process would have got from the one that started it."""
    if asked["session"]:
        os.setsid()
    nothing, output, *passed = streams
    for fd, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(fd, number)
    spare = [fcntl.fcntl(fd, fcntl.F_DUPFD, 500) for fd in passed]  # apart from the numbers that they get
    for fd in streams:
        os.close(fd)
    for fd, number in zip(spare, asked["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    if asked["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number in asked["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    # Python asks a stream once whether it is a terminal, and whether it has a position.
    sys.stdout = os.fdopen(1, "w", 1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    python_path = [each for each in asked["env"].get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:1] = [asked["cwd"], *python_path]
    importlib.invalidate_caches()


def main() -> None:
    import gc
    import runpy

    from roll_core import openmp
    from roll_testing.rank_host import fill_caches

    os.environ.update(openmp.environment(os.environ))
    for module in IMPORTED:
        importlib.import_module(module)
    fill_caches()
    gc.freeze()
    control = socket.socket(fileno=int(sys.argv[1]))
    asked = None
    with suppress(KeyboardInterrupt):
        asked = serve(control)
    if asked is None:
        return
    module, *arguments = asked["words"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
