"""Starts a worker's process under an interpreter of its own, and speaks with it in frames of bytes.

The bytes of arguments and results are made and read by the two ends that know what they mean: here they pass through.
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
"""How long a process may take until it says hello, by when it has imported nothing that is heavy."""
END_S = 5.0
"""How long it may take to end once it has closed its worker, or has hung up."""


class ProcessEndedError(Exception):
    """The process is gone: `was killed by SIGKILL`, `ended with code 1`. A signal between an actor and the driver."""


class IsolatedEnvProcess:
    """One process, from one event loop. It ends with the socket to it, so with this process at the latest."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: `role`, `rank`, `level`, `crash_file`, and `reported`, distributions for its fingerprint."""
        self._settings = settings
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._process: subprocess.Popen[bytes]
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    async def start(self, python: Path, env: Mapping[str, str]) -> dict[str, Any]:
        """What it says of itself: `pid`, `host`, `fingerprint`. Raises `PythonEnvironmentError`."""
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
        """Make the worker; the answer of `codecs.answer`."""
        return await self._ask(MAKE, payload)

    def begin(self, method: str, payload: bytes) -> asyncio.Future[bytes]:
        """Begin a call, after those begun before. Cancelling the future ends the call if its method is async."""
        number = next(self._numbers)
        future = self._ask(CALL, method.encode() + b"\0" + payload, number)

        def tell_if_cancelled(done: asyncio.Future[bytes]) -> None:
            if done.cancelled() and not self._ended.is_set():
                self._writer.write(frame(CANCEL, number))

        future.add_done_callback(tell_if_cancelled)
        return future

    async def stack(self) -> str:
        """Where the worker is right now."""
        return (await self._ask(STACK)).decode()

    async def ended(self) -> str:
        """Wait for its end; how it ended."""
        await self._ended.wait()
        return await self._cause()

    async def close(self, timeout_s: float) -> None:
        """Close the worker, and end the process, if it was started."""
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
        except Exception:  # whatever it sent: without its answers the process is of no use
            log.exception("%s: an answer cannot be read, so its process is killed", self._settings["role"])
            self._process.kill()
        self._ended.set()
        self._writer.close()
        cause = await self._cause()
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(ProcessEndedError(cause))

    async def _cause(self) -> str:
        """How it ended; one that has hung up and does not end is killed."""
        try:
            code = await asyncio.to_thread(self._process.wait, END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = await asyncio.to_thread(self._process.wait)
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}"
