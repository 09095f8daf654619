"""The worker's end of the server: a process of its own, asked over HTTP.

    worker                          server (`serve`)            SGLang's other processes
    standard input, held open  ->   arguments; ends with it
    HTTP                      <->   SGLang's routes       <->   schedulers, detokenizer

SGLang's engine in the worker's own process would set its event loop, signals and start method, and end all of the
process's children with itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

import aiohttp
import psutil

from roll_core.errors import ConfigError, ConfigProblem, EngineDiedError, RollError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

STOP_S = 30.0
"""For the processes to be gone, once they are killed."""
LONGEST_LINE = 1 << 30
"""Bytes of one streamed answer: it has all tokens and logprobs of a response."""


class ServerError(RollError):
    """The server is dead, or refused what it was asked."""


class ServerDiedError(ServerError, EngineDiedError):
    """It is dead, or as good as that."""


class Server:
    """One at a time. All methods are called on one event loop."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._process: subprocess.Popen[bytes] | None = None
        self._session: aiohttp.ClientSession | None = None
        self.url = ""
        self.carrier = ""
        """A logit processor as SGLang wants it, see `sampler.Carrier`."""

    async def start(self, arguments: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        """Returns when it can be asked. Raises `ServerError` if it ends before."""
        key = secrets.token_hex(16)
        host = str(arguments["host"])
        with _reserved_port(host) as port:
            said = await self._launch({**arguments, "port": port, "admin_api_key": key}, variables)
        _refuse_unknown(said.get("unknown", {}))
        self.carrier = said["carrier"]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._session = aiohttp.ClientSession(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"},
            # A connection for each request: of a kept one the server may have just given up its end, and what
            # is asked over it then is lost, without a word on whether SGLang has read it.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=LONGEST_LINE,
        )

    async def _launch(self, arguments: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
        """What the server says once it is ready."""
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
        with os.fdopen(reading, "rb") as pipe:
            found: dict[str, Any] = json.loads(await asyncio.to_thread(_begin, self._who, self._process, line, pipe))
        return found

    async def ask(self, path: str, body: Any = None) -> Any:
        """What a route answers to a POST (GET without a body). Raises `ServerError`."""
        session = self._alive
        try:
            method = "GET" if body is None else "POST"
            async with session.request(method, path, json=body) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise ServerError(f"{self._who}: SGLang answered {path} with {answer.status}: {text[:2000]}")
                return json.loads(text) if text.startswith(("{", "[")) else text
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._died(path) from error

    async def stream(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """The answers of a route that streams, one after the other. Raises `ServerError`."""
        session = self._alive
        try:
            async with session.post(path, json=body) as answer:
                if answer.status != 200:
                    text = await answer.text()
                    raise ServerError(f"{self._who}: SGLang answered {path} with {answer.status}: {text[:2000]}")
                async for line in answer.content:
                    said = line.strip().removeprefix(b"data: ")
                    if said == b"[DONE]":
                        return
                    if said:
                        yield json.loads(said)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._died(path) from error
        raise self._died(path)

    def processes(self) -> list[int]:
        """Ids of the server's processes, itself first; none where it does not run."""
        if self._process is None:
            return []
        try:
            server = psutil.Process(self._process.pid)
            return [server.pid, *(each.pid for each in server.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    async def stop(self) -> None:
        """End all its processes. May be called several times, also after an error."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_end, process)

    @property
    def _alive(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the engine does not run: start it first, and not after stop")
        return self._session

    def _died(self, path: str) -> ServerDiedError:
        process = self._process
        status = process.poll() if process is not None else None
        how = "is dead" if status is not None else "does not answer"
        return ServerDiedError(f"{self._who}: SGLang's server {how} ({path}); its own messages above say why")


def _begin(who: str, process: subprocess.Popen[bytes], line: bytes, pipe: BinaryIO) -> bytes:
    """Hand the arguments over and wait for the word that the server is ready."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
    # The pipe ends with the word, or with the process: no other has its writing end.
    said = pipe.read()
    if not said:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        raise ServerError(
            f"{who}: SGLang's server ended with status {process.poll()} while it started; its own messages above say"
            " why"
        )
    return said


def _refuse_unknown(unknown: Mapping[str, Sequence[str]]) -> None:
    """The installed engine may be another release than the one whose arguments `check` knows."""
    problems = [
        ConfigProblem(
            where="strategy_config",
            key=name,
            message="the installed SGLang has no such argument",
            hint=f"did you mean {close[0]}?" if close else "",
            code="ROLL-C010",
        )
        for name, close in unknown.items()
    ]
    if problems:
        raise ConfigError(problems)


@contextlib.contextmanager
def _reserved_port(host: str) -> Iterator[int]:
    """A port that the host gives to nobody else meanwhile: the server binds it minutes later, once a model is loaded.

    It is bound and not listened at. So whoever says SO_REUSEADDR, as SGLang and its server do, can bind it beside.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield int(held.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the server and whatever it has started; SGLang's processes leave nothing but memory."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait(STOP_S)
    psutil.wait_procs(family, timeout=STOP_S)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
