"""Server in a worker process under its own interpreter; the counterpart of `RayHost`.

    IsolatedEnvProcess ══ socket ══► Served ─► WorkerHost ─► worker

The process exits when the other end of its socket closes, even while the worker is busy.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import select
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.host import hostname, usable_cores
from roll_core.runtime.cluster.concurrency import background, end_on_failure
from roll_core.runtime.cluster.executors.calls import CallFailed, Failure
from roll_core.runtime.cluster.executors.codecs import WIRE, answer, encode_failure
from roll_core.runtime.cluster.executors.frames import (
    ANSWER,
    CALL,
    CANCEL,
    CLOSE,
    HELLO,
    MAKE,
    STACK,
    frame,
    read_frame,
)
from roll_core.runtime.cluster.executors.host import WorkerHost
from roll_core.runtime.cluster.executors.sigterm_mask import be_deaf_to
from roll_core.runtime.records.provenance import versions

if TYPE_CHECKING:
    import socket
    from collections.abc import Coroutine, Mapping

log = logging.getLogger(__name__)


def serve(connection: socket.socket, settings: Mapping[str, Any]) -> None:
    """Handle the frames from `connection` until a `CLOSE` frame arrives or the connection closes."""
    name = f"{settings['role']}[{settings['rank']}]"
    logging.basicConfig(level=settings["level"], format=f"%(levelname)s {name} %(name)s: %(message)s", force=True)
    be_deaf_to(signal.SIGTERM)
    if Path(settings["crash_file"]).parent.is_dir():
        # The file stays open for the life of the process: the signal handler writes the crash report to it.
        faulthandler.enable(Path(settings["crash_file"]).open("w"))  # noqa: SIM115
    threading.Thread(target=_end_with, args=(connection.fileno(),), name="end-with-starter", daemon=True).start()
    asyncio.run(Served(settings).run(connection))


class Served:
    """One worker behind a socket. Calls begin in the order of their arrival."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._host = WorkerHost(settings["role"], settings["rank"])
        self._running: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter

    async def run(self, connection: socket.socket) -> None:
        """Send `HELLO`, then handle frames until `CLOSE`.

        A result that cannot be sent ends the process. The driver then detects the exit instead of waiting for the
        result.
        """
        end_on_failure(_end_with_failure)
        reader, self._writer = await asyncio.open_connection(sock=connection)
        fingerprint = {"executable": sys.executable, **versions(self._settings["reported"])}
        hello = {"pid": os.getpid(), "host": hostname(), "fingerprint": fingerprint}
        self._writer.write(frame(HELLO, 0, json.dumps(hello).encode()))
        while True:
            try:
                kind, number, body = await read_frame(reader)
            except EOFError:
                return
            if kind == CALL:
                self._call(number, body)
            elif kind == MAKE:
                self._answer(number, answer(WIRE, self._make(body)))
            elif kind == CANCEL and number in self._running:
                self._running[number].cancel()
            elif kind == STACK:
                self._write(number, self._host.stack().encode())
            elif kind == CLOSE:
                await self._host.close(float(body))
                self._write(number, b"")
                await self._writer.drain()
                return

    async def _make(self, body: bytes) -> None:
        try:
            target, place, peers, args, env, path = WIRE.loads(body)
        except Exception as error:
            raise CallFailed(Failure.of(error)) from error
        os.environ.update(env)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        await self._host.make(target, replace(place, num_threads=place.threads_of(usable_cores())), peers, args)

    def _call(self, number: int, body: bytes) -> None:
        method, _, payload = body.partition(b"\0")
        try:
            future = self._host.begin(method.decode(), WIRE.loads(payload))
        except Exception as error:
            self._write(number, encode_failure(WIRE, Failure.of(error)))
            return
        self._running[number] = future
        future.add_done_callback(lambda _: self._running.pop(number, None))
        self._answer(number, answer(WIRE, future))

    def _answer(self, number: int, answering: Coroutine[Any, Any, bytes]) -> None:
        async def send() -> None:
            self._write(number, await answering)

        task = background(send(), name=f"answer {number}")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _write(self, number: int, body: bytes) -> None:
        self._writer.write(frame(ANSWER, number, body))


def _end_with_failure(error: BaseException) -> None:
    log.error("this worker's process ends", exc_info=error)
    os._exit(1)


def _end_with(descriptor: int) -> None:
    """Exit as soon as the other end of the socket closes, without the event loop: it may be blocked for long."""
    waiting = select.poll()
    waiting.register(descriptor, 0)  # poll always reports a hang-up
    waiting.poll()
    os._exit(1)
