"""Process of a worker: its log and signals, and its entry point if it has its own interpreter.

    executor ══ socket ══► `python -m …worker_main <socket descriptor> <settings>` ─► WorkerServer ─► worker

The interpreter needs roll-core and the part that the worker runs, but not the package of the executor. Frames on the
socket have a number and a body. The process first sends frame 0: its facts, or the reason why it cannot run, as JSON.
Then each request `[method, arguments]` gets a reply with the same number; both are serialized by `wire`.

Imports only the standard library until frame 0, so that a broken environment can be reported.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)
_HEAD = struct.Struct("!QQ")


def ignore_stop_signals() -> None:
    """Ignore SIGTERM and SIGHUP in this process. Children of this thread and of its threads still receive them.

    Python lets only the main thread set a handler, which may belong to the executor's library. faulthandler sets its
    handler from any thread; it writes a traceback, here to the null device.
    """
    null = os.open(os.devnull, os.O_WRONLY)  # stays open for the life of the process
    for number in (signal.SIGTERM, signal.SIGHUP):
        faulthandler.register(number, file=null, all_threads=False, chain=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})


def prepare_process(name: str, level: int, crash_file: str = "") -> None:
    """Set up the log and signals of a worker's process, and the file for its crash report."""
    logging.basicConfig(level=level, format=f"%(levelname)s {name} %(name)s: %(message)s", force=True)
    ignore_stop_signals()
    if crash_file and Path(crash_file).parent.is_dir():
        # The file stays open for the life of the process: the signal handler writes the crash report to it.
        faulthandler.enable(Path(crash_file).open("w"))  # noqa: SIM115


def frame(number: int, body: bytes) -> bytes:
    """Encode one frame."""
    return _HEAD.pack(number, len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read the next frame. Raises `EOFError` if the connection is closed or broken."""
    try:
        number, num_bytes = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        return number, await reader.readexactly(num_bytes)
    except ConnectionError as error:
        raise EOFError from error


def main() -> None:
    """Serve one worker until its `close` returns. The process exits at once when the socket's other end closes."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    try:
        import roll_core.runtime.records.provenance  # noqa: F401
        from roll_core.runtime.cluster.executors import worker_server  # noqa: F401
    except BaseException as error:  # SystemExit included: any failure of the environment is reported
        reason = f"importing roll-core failed: {type(error).__name__}: {error}"
        connection.sendall(frame(0, json.dumps({"error": reason}).encode()))
        sys.exit(1)
    prepare_process(f"{settings['role']}[{settings['rank']}]", settings["level"], settings["crash_file"])
    threading.Thread(target=_exit_with, args=(connection.fileno(),), name="exit-with-starter", daemon=True).start()
    asyncio.run(_serve(connection, settings))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine may have left non-daemon threads that do not end


async def _serve(connection: socket.socket, settings: Mapping[str, Any]) -> None:
    """Send frame 0, then handle requests until `close`.

    A reply that cannot be sent ends the process. The driver then detects the exit instead of waiting for the reply.
    """
    from roll_core.host import hostname
    from roll_core.runtime.cluster.concurrency import background, end_on_failure
    from roll_core.runtime.cluster.executors.worker_server import WIRE, WorkerServer
    from roll_core.runtime.records.provenance import versions

    end_on_failure(_exit_after)
    server = WorkerServer(settings["role"], settings["rank"], WIRE)
    reader, writer = await asyncio.open_connection(sock=connection)
    fingerprint = {"executable": sys.executable, **versions(settings["reported"])}
    writer.write(frame(0, json.dumps({"pid": os.getpid(), "host": hostname(), "fingerprint": fingerprint}).encode()))
    replying = set()

    async def reply(number: int, method: str, args: list[Any]) -> None:
        writer.write(frame(number, WIRE.dumps(await getattr(server, method)(*args))))

    while True:
        try:
            number, body = await read_frame(reader)
        except EOFError:
            return
        method, args = WIRE.loads(body)
        if method == "close":
            await reply(number, method, args)
            await writer.drain()
            return
        task = background(reply(number, method, args), name=f"reply {number}")
        replying.add(task)
        task.add_done_callback(replying.discard)


def _exit_after(error: BaseException) -> None:
    log.error("a reply failed, so this process exits", exc_info=error)
    os._exit(1)


def _exit_with(descriptor: int) -> None:
    """Exit as soon as the socket's other end closes, without the event loop: it may be blocked for long."""
    poll = select.poll()
    poll.register(descriptor, 0)  # poll always reports a hang-up
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    main()
