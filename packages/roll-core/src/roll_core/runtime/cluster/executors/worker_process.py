"""Starts the process of a worker and forwards calls to it: the other end of `worker_main`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import signal
import socket
import subprocess
from typing import TYPE_CHECKING, Any

from roll_core.errors import PythonEnvironmentError
from roll_core.host import hostname
from roll_core.runtime.cluster.concurrency import background
from roll_core.runtime.cluster.executors import wire, worker_main
from roll_core.runtime.cluster.executors.worker_main import frame, read_frame

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

log = logging.getLogger(__name__)

START_S = 120.0
"""Seconds until the process must send its facts. Until then it imports no heavy module."""
END_S = 5.0
"""Seconds until the process must exit after it has closed its worker or its socket."""


class ProcessEndedError(Exception):
    """A worker's process exited: `was killed by SIGKILL`, `exited with code 1`. Internal to executors."""


class WorkerProcess:
    """One worker process, used from one event loop.

    It exits when its socket closes, so it does not outlive this process.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings` has `role`, `rank`, `level`, `crash_file` and `reported` (distributions for the fingerprint)."""
        self._settings = settings
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._process: subprocess.Popen[bytes]
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    async def start(self, python: Path, env: Mapping[str, str]) -> dict[str, Any]:
        """Start the process. Returns its `pid`, `host` and `fingerprint`. Raises `PythonEnvironmentError`."""
        ours, theirs = socket.socketpair()
        descriptor = theirs.fileno()
        command = [str(python), "-P", "-m", worker_main.__name__, str(descriptor), json.dumps({**self._settings})]
        with theirs:
            self._process = subprocess.Popen(command, env={**env}, stdin=subprocess.DEVNULL, pass_fds=(descriptor,))
        reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            facts = await self._facts(reader, f"{self._settings['role']} on {hostname()}: environment {python}")
        except BaseException:
            self._writer.close()
            self._process.kill()
            self._process.wait()
            raise
        self._reading = background(self._read(reader), name="replies of a worker's process")
        return facts

    async def _facts(self, reader: asyncio.StreamReader, where: str) -> dict[str, Any]:
        try:
            _, body = await asyncio.wait_for(read_frame(reader), START_S)
        except EOFError as error:
            raise PythonEnvironmentError(
                f"{where}: its process {await self._cause()} during its start; its output is in the log"
            ) from error
        except TimeoutError as error:
            raise PythonEnvironmentError(f"{where}: its process did not start within {START_S:g} s") from error
        facts: dict[str, Any] = json.loads(body)
        if "error" in facts:
            raise PythonEnvironmentError(f"{where}: {facts['error']}. Rebuild the environment")
        return facts

    def request(self, method: str, *args: Any) -> asyncio.Future[Any]:
        """Call a method of the process's `WorkerServer`. The future raises `ProcessEndedError` if the process exits."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._ended.is_set():
            future.set_exception(ProcessEndedError("has exited"))
            return future
        number = next(self._numbers)
        self._pending[number] = future
        future.add_done_callback(lambda _: self._pending.pop(number, None))
        self._writer.write(frame(number, wire.dumps([method, list(args)])))
        return future

    def kill(self) -> None:
        """Kill the process. Pending and later requests raise `ProcessEndedError`."""
        self._process.kill()

    async def ended(self) -> str:
        """Wait until the process exits. Returns how it exited."""
        await self._ended.wait()
        return await self._cause()

    async def close(self, timeout_s: float) -> None:
        """Close the worker and end the process, if it was started."""
        if self._reading is None:
            return
        with contextlib.suppress(ProcessEndedError):
            await self.request("close", timeout_s)
        self._writer.close()
        await self._reading

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            with contextlib.suppress(EOFError):
                while True:
                    number, body = await read_frame(reader)
                    future = self._pending.get(number)
                    if future is not None and not future.done():
                        future.set_result(wire.loads(body))
        except Exception:  # unreadable data: without replies the process is useless
            log.exception("%s: a reply cannot be read, so its process is killed", self._settings["role"])
            self._process.kill()
        self._ended.set()
        self._writer.close()
        cause = await self._cause()
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(ProcessEndedError(cause))

    async def _cause(self) -> str:
        """How the process exited. Kills a process that closed its socket but does not exit."""
        try:
            code = await asyncio.to_thread(self._process.wait, END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = await asyncio.to_thread(self._process.wait)
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"
