"""Client of the SGLang server, which runs in a separate process and is accessed over HTTP.

    worker                          server (`serve`)            SGLang's other processes
    standard input, kept open  ->   arguments; exits when it closes
    HTTP                      <->   SGLang's routes       <->   schedulers, detokenizer

SGLang's engine does not run in the worker's own process: there it would replace the event loop, signal handlers and
start method, and kill all of the worker's child processes when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil

from roll_core.errors import EngineDiedError, RollError
from roll_infer_sglang.serve import unlink_segments
from roll_modeling.engine_config import check_arguments

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

STOP_S = 30.0
"""Seconds for processes to exit after they are killed."""
MAX_LINE_BYTES = 1 << 30
"""Maximum bytes of one line of a streamed response, which may contain all tokens and logprobs of a response."""


class ServerError(RollError):
    """The server is dead or rejected a request."""


class ServerDiedError(ServerError, EngineDiedError):
    """The server process exited or does not respond."""


class SglangServer:
    """Server process and HTTP client. All methods are called on one event loop."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._process: subprocess.Popen[bytes] | None = None
        self._session: aiohttp.ClientSession | None = None
        self.url = ""
        self.logit_processor = ""
        """Serialized logit processor in SGLang's format, see `sampler.ParamsProcessor`."""

    async def start(self, arguments: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        """Start the server process; returns when it accepts requests.

        Raises `ServerError` if the process exits before, and `ConfigError` for arguments that the installed SGLang
        lacks.
        """
        key = secrets.token_hex(16)
        host = str(arguments["host"])
        # SGLang would choose `nccl_port`, that of torch's store, long before it listens there.
        with _reserved_port(host) as port, _reserved_port(host) as store_port:
            all_arguments = {**arguments, "port": port, "nccl_port": store_port, "admin_api_key": key}
            reply = await self._spawn(all_arguments, variables)
        check_arguments("SGLang", arguments, reply.get("known", arguments))
        self.logit_processor = reply["logit_processor"]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._session = aiohttp.ClientSession(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"},
            # One connection per request: the server may close a keep-alive connection at any moment. A request sent
            # on it is then lost, and the client cannot know whether SGLang has read it.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=MAX_LINE_BYTES,
        )

    async def _spawn(self, arguments: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
        """Start the process and wait until it is ready. Returns the message of `serve`."""
        reading, writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "roll_infer_sglang.serve"],
                stdin=subprocess.PIPE,
                env={**os.environ, **variables},
                pass_fds=[writing],
                start_new_session=True,
            )
        finally:
            os.close(writing)
        line = json.dumps({"arguments": arguments, "ready": writing}).encode() + b"\n"
        reply = await asyncio.to_thread(_wait_ready, self._who, self._process, line, reading)
        started: dict[str, Any] = json.loads(reply)
        return started

    async def request(self, path: str, body: Any = None) -> Any:
        """Send a POST request (GET without a body) and return the response, parsed if it is a JSON object or list.

        Raises `ServerError`.
        """
        session = self._alive
        try:
            method = "GET" if body is None else "POST"
            async with session.request(method, path, json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise _rejected(self._who, path, response.status, text)
                return json.loads(text) if text.startswith(("{", "[")) else text
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._died(path) from error

    async def stream(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """Send a POST request and yield the JSON messages of its streamed response. Raises `ServerError`."""
        session = self._alive
        content = io.BytesIO(json.dumps(body).encode())  # with images it is large: aiohttp reads files in a thread
        headers = {"Content-Type": "application/json"}
        try:
            async with session.post(path, data=content, headers=headers) as response:
                if response.status != 200:
                    raise _rejected(self._who, path, response.status, await response.text())
                async for line in response.content:
                    message = line.strip().removeprefix(b"data: ")
                    if message == b"[DONE]":
                        return
                    if message:
                        yield json.loads(message)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._died(path) from error
        raise self._died(path)

    def processes(self) -> list[int]:
        """Process ids of the server and its descendants, the server first; empty if it is not running."""
        if self._process is None:
            return []
        try:
            server = psutil.Process(self._process.pid)
            return [server.pid, *(child.pid for child in server.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    async def stop(self) -> None:
        """Kill all processes of the server. Idempotent; may be called after an error."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_kill, process)

    @property
    def _alive(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the engine is not running: call `start` first, and do not use it after `stop`")
        return self._session

    def _died(self, path: str) -> ServerDiedError:
        process = self._process
        status = process.poll() if process is not None else None
        state = "has exited" if status is not None else "does not respond"
        return ServerDiedError(f"{self._who}: SGLang's server {state} ({path}); it logged the reason above")


def _rejected(who: str, path: str, status: int, text: str) -> ServerError:
    return ServerError(f"{who}: SGLang returned status {status} for {path}: {text[:2000]}")


def _wait_ready(who: str, process: subprocess.Popen[bytes], line: bytes, reading: int) -> bytes:
    """Send the arguments and wait for the server's ready message. Raises `ServerError` if the process exits before.

    `reading` is closed here, on the thread that reads from it: another one would wait for the reader.
    """
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
    # Reads until the pipe closes: after the ready message, or when the process exits. No other process can write to it.
    with os.fdopen(reading, "rb") as pipe:
        reply = pipe.read()
    if not reply:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        raise ServerError(
            f"{who}: SGLang's server exited with status {process.poll()} while it started; it logged the reason above"
        )
    return reply


@contextlib.contextmanager
def _reserved_port(host: str) -> Iterator[int]:
    """Context manager that reserves a free port: the server binds it only minutes later, after loading the model.

    The socket is bound but does not listen. So sockets with SO_REUSEADDR, such as those of SGLang and its HTTP server,
    can bind the same port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, 0))
        yield int(reserved.getsockname()[1])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the server and all its descendants, and unlink their shared memory."""
    try:
        server = psutil.Process(process.pid)
        family = server.children(recursive=True)
        unlink_segments([server, *family])
    except psutil.NoSuchProcess:
        family = []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(STOP_S)
    psutil.wait_procs(family, timeout=STOP_S)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
