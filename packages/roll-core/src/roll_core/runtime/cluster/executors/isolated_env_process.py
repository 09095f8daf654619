"""Starts a worker process under its own interpreter, and exchanges frames of bytes with it.

This module passes serialized arguments and results through; it never decodes them.
"""

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
from roll_core.runtime.cluster.executors.frames import ANSWER, CALL, CANCEL, CLOSE, MAKE, STACK, frame, read_frame

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

log = logging.getLogger(__name__)

START_S = 120.0
"""Seconds until the process must send `HELLO`. Until then it imports no heavy module."""
END_S = 5.0
"""Seconds until the process must exit after it has closed its worker or its socket."""


class ProcessEndedError(Exception):
    """The process exited: `was killed by SIGKILL`, `ended with code 1`. Internal to the actor and the driver."""


class IsolatedEnvProcess:
    """One worker process, used from one event loop.

    It exits when its socket closes, so it does not outlive this process.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings` has `role`, `rank`, `level`, `crash_file` and `reported` (distributions for the fingerprint)."""
        self._settings = settings
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._process: subprocess.Popen[bytes]
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    async def start(self, python: Path, env: Mapping[str, str]) -> dict[str, Any]:
        """Start the process. Returns its `HELLO`: `pid`, `host`, `fingerprint`. Raises `PythonEnvironmentError`."""
        ours, theirs = socket.socketpair()
        command = [
            str(python),
            "-P",
            "-m",
            "roll_core.runtime.cluster.executors.isolated_env_main",
            str(theirs.fileno()),
        ]
        with theirs:
            self._process = subprocess.Popen(
                [*command, json.dumps(dict(self._settings))],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            hello = await self._hello(reader, f"{self._settings['role']} on {hostname()}: environment {python}")
        except BaseException:
            self._writer.close()
            self._process.kill()
            self._process.wait()
            raise
        self._reading = background(self._read(reader), name="answers of a worker's process")
        return hello

    async def _hello(self, reader: asyncio.StreamReader, where: str) -> dict[str, Any]:
        try:
            _, _, body = await asyncio.wait_for(read_frame(reader), START_S)
        except EOFError as error:
            raise PythonEnvironmentError(
                f"{where}: its process {await self._cause()} while it started; what it said is in the log"
            ) from error
        except TimeoutError as error:
            raise PythonEnvironmentError(f"{where}: its process said nothing within {START_S:g} s") from error
        hello: dict[str, Any] = json.loads(body)
        if "error" in hello:
            raise PythonEnvironmentError(f"{where}: {hello['error']}. The environment is broken: make it anew")
        return hello

    async def make(self, payload: bytes) -> bytes:
        """Construct the worker. Returns the serialized result of `codecs.answer`."""
        return await self._ask(MAKE, payload)

    def begin(self, method: str, payload: bytes) -> asyncio.Future[bytes]:
        """Begin a call after the earlier ones. Cancelling the future cancels the call if its method is async."""
        number = next(self._numbers)
        future = self._ask(CALL, method.encode() + b"\0" + payload, number)

        def tell_if_cancelled(done: asyncio.Future[bytes]) -> None:
            if done.cancelled() and not self._ended.is_set():
                self._writer.write(frame(CANCEL, number))

        future.add_done_callback(tell_if_cancelled)
        return future

    async def stack(self) -> str:
        """Current stacks of the worker's threads."""
        return (await self._ask(STACK)).decode()

    async def ended(self) -> str:
        """Wait until the process exits. Returns how it exited."""
        await self._ended.wait()
        return await self._cause()

    async def close(self, timeout_s: float) -> None:
        """Close the worker and end the process, if it was started."""
        if self._reading is None:
            return
        with contextlib.suppress(ProcessEndedError):
            await self._ask(CLOSE, repr(timeout_s).encode())
        self._writer.close()
        await self._reading

    def _ask(self, kind: int, body: bytes = b"", number: int | None = None) -> asyncio.Future[bytes]:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self._ended.is_set():
            future.set_exception(ProcessEndedError("is gone"))
            return future
        number = next(self._numbers) if number is None else number
        self._waiting[number] = future
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        self._writer.write(frame(kind, number, body))
        return future

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            with contextlib.suppress(EOFError):
                while True:
                    kind, number, body = await read_frame(reader)
                    future = self._waiting.get(number)
                    if kind == ANSWER and future is not None and not future.done():
                        future.set_result(body)
        except Exception:  # unreadable data: without results the process is useless
            log.exception("%s: an answer cannot be read, so its process is killed", self._settings["role"])
            self._process.kill()
        self._ended.set()
        self._writer.close()
        cause = await self._cause()
        for future in list(self._waiting.values()):
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
        return f"ended with code {code}"
