"""Child process that computes rewards: started by path, it imports only the standard library and its target.

    parent (RewardPool)                      child (this file)
       hello: sys.path, target, options  ->  load the target
                  pid, facts (ready) | error <-
       job: number, arguments, seconds   ->  handle(**arguments)
                number, pid, result | error <-
       end of file                       ->  close the target, exit

Messages on the socket are JSON. A reply has the number of its job and the process id: if a target forks and both
processes return, only the first one replies. A child exits with its parent in each state:

- idle: it reads an end of file
- busy in Python: a thread detects that the parent exited
- busy in C code that holds the GIL: a kernel timer kills it shortly after its job's deadline
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

READY = -1
"""Number of the reply that reports whether the target is loaded."""
GRACE_S = 2.0
"""Seconds between the parent's deadline and the kernel timer that backs it up."""


def main() -> None:
    """Serve jobs from the socket whose descriptor is the only argument, until the parent closes it."""
    os.dup2(2, 1)  # prints of a function must not appear as the run's own output
    connection = socket.socket(fileno=int(sys.argv[1]))
    parent = os.getppid()
    hello = receive(connection)
    if hello is None:
        return
    threading.Thread(target=_end_with_parent, args=(connection, parent), daemon=True).start()
    sys.path[:] = hello["sys_path"]
    limit_mb = hello["memory_mb"]
    if limit_mb:
        # Limits heap and other private memory. Unlike RLIMIT_AS it ignores memory that libraries such as CUDA reserve
        # but never use. Some systems (macOS) do not enforce it: then only the time is limited.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (limit_mb << 20,) * 2)
    pid = os.getpid()

    def outcome(act: Callable[[], Any], number: int) -> bytes:
        try:
            reply = {"result": act()}
            json.dumps(reply)
        except BaseException as error:  # third-party code: the parent reports it
            reply = failure_of(error, limit_mb)
        if os.getpid() != pid:
            os._exit(0)  # the target forked and also returned here: only the first process replies
        return encode({"number": number, "pid": pid, **reply})

    loaded: list[Callable[..., Any]] = []

    def load() -> Any:
        module, _, attribute = hello["target"].partition(":")
        loaded.append(getattr(importlib.import_module(module), attribute)(hello["options"]))
        return getattr(loaded[0], "facts", None)

    connection.sendall(outcome(load, READY))
    if not loaded:
        return
    (handle,) = loaded
    while (job := receive(connection)) is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, job["seconds"] + GRACE_S)
        reply = outcome(partial(handle, **job["arguments"]), job["number"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.sendall(reply)
    if hasattr(handle, "close"):
        handle.close()


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode one frame: four bytes of length, then JSON. ASCII supports any text, including lone surrogates."""
    payload = json.dumps(message).encode("ascii")
    return struct.pack("!I", len(payload)) + payload


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Receive the next frame; None if the other side has closed."""
    header = _read(connection, 4)
    if header is None:
        return None
    payload = _read(connection, struct.unpack("!I", header)[0])
    if payload is None:
        return None
    message: dict[str, Any] = json.loads(payload)
    return message


def error_text(error: object) -> str:
    """Text of an exception of third-party code, whose `__str__` may raise."""
    try:
        return str(error)
    except BaseException as problem:
        return f"its text cannot be made: {type(problem).__name__}"


def describe(error: BaseException) -> str:
    """One-line description: `ValueError: no such unit (rewards.py:12 in score)`, and the error's notes.

    A `RewardFailure` gives only its message.
    """
    text = " ".join(error_text(error).split())[:500]
    if type(error).__name__ == "RewardFailure":
        return text or "the function gave no reason"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    notes = "".join(f"; {' '.join(error_text(note).split())[:500]}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}{notes}"


def failure_of(error: BaseException, limit_mb: int | None) -> dict[str, str]:
    """Reply for an exception of the target: the reason, and the traceback unless it is a `RewardFailure`."""
    reason = describe(error)
    if limit_mb and (isinstance(error, MemoryError) or "allocate memory" in error_text(error)):
        reason += f"; its process may take memory_limit_mb = {limit_mb} MB"
    if type(error).__name__ == "RewardFailure":
        return {"error": reason}
    return {"error": reason, "trace": "".join(traceback.format_exception(error))}


def _read(connection: socket.socket, num_bytes: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = connection.recv(num_bytes - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _end_with_parent(connection: socket.socket, parent: int) -> None:
    """Kill this process group once the parent has closed the socket or exited."""
    poll = select.poll()
    poll.register(connection, 0)  # only hang-ups, which are always reported; this thread reads no jobs
    while os.getppid() == parent and not poll.poll(1000):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
