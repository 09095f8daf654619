"""Process that runs environments, one after the other. The driver starts it with the number of a connected socket.

    driver                                     this process
      {"describe": "module:Class", "options"} ► {"result"}, see `Description`
      {"create": "module:Class", "options"}  ►  instance
      {"call": "step", "arguments"}          ►  {"result", "type"} or {"error", "trace"}
      {"call": "close"}                      ►  {"result"}; then the next create

Lines of JSON in both directions. When the driver exits, the socket closes: this process and all that it started end,
also during a call.

This file imports only the standard library, because it also runs in interpreters without our packages, from Python 3.8
on. There, `roll_core` is the driver's unless the interpreter has its own: `roll_core.spec` needs no other package.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import importlib
import importlib.machinery
import inspect
import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PRIVATE = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")
"""Environment variables for the driver's interpreter, which another interpreter does not get."""
DESCRIBE_S = 300.0
"""Maximum seconds to import an environment in another interpreter before a run."""
ARGUMENTS = {"step": "environment:Reply", "run": "agent:Session"}
"""Class in `roll_core.spec` of the last argument of a method."""


def start_process(python: str = "", stdout: int | None = None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start this file as a process. Returns it and the driver's socket. `python`: another interpreter."""
    ours, theirs = socket.socketpair()
    variables = {key: value for key, value in os.environ.items() if not python or key not in PRIVATE}
    root = os.path.dirname(os.path.dirname(str(importlib.import_module("roll_core").__file__)))
    try:
        with theirs:
            # A session of its own: only the driver handles Ctrl-C, and a kill also ends what the environment started.
            process = subprocess.Popen(
                [python or sys.executable, __file__, str(theirs.fileno()), root],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=variables,
            )
    except BaseException:
        ours.close()
        raise
    return process, ours


def kill_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a process of `start_process` and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # already exited
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@lru_cache(maxsize=256)
def describe(python: str, target: str, options: str) -> dict[str, Any]:
    """Facts about a class in another interpreter, which imports it: `reports_success`. `options` is JSON text.

    Raises `CallFailed` if it cannot be imported there, lacks a method, or does not take the options.
    """
    try:
        process, ours = start_process(python, subprocess.DEVNULL)
    except OSError as error:
        raise CallFailed(f"{python} cannot be started: {described(error)}") from error
    try:
        with ours:
            ours.settimeout(DESCRIBE_S)
            ours.sendall(json.dumps({"describe": target, "options": json.loads(options)}).encode() + b"\n")
            with ours.makefile("rb") as stream:
                line = stream.readline()
    except TimeoutError as error:  # in the driver, so of a recent Python
        raise CallFailed(f"{python} took longer than {DESCRIBE_S:g} s to import {target}") from error
    except OSError as error:
        raise CallFailed(f"{python} exited before it imported {target}") from error
    finally:
        kill_process(process)
    if not line:
        raise CallFailed(f"{python} exited while it imported {target}")
    reply = json.loads(line)
    if "error" in reply:
        raise CallFailed(f"{python} cannot use {target}: {reply['error']}")
    result: dict[str, Any] = reply["result"]
    return result


class CallFailed(Exception):
    """The error of a call in another process. Its text is that of `described` there."""


class BlockingCalls:
    """One environment, called from one thread. Coroutines run on an event loop of this object."""

    def __init__(self, create: Callable[[], Any]) -> None:
        self._environment = create()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Call a method and return its result."""
        result = getattr(self._environment, method)(*arguments)
        if not inspect.isawaitable(result):
            return result
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(result))

    def close(self) -> None:
        """Close the environment and the event loop."""
        try:
            self("close")
        finally:
            if self._loop is not None:
                self._loop.close()


async def _awaited(result: Any) -> Any:
    return await result


def described(error: BaseException) -> str:
    """Class and message of an exception, on one line."""
    try:
        reason = " ".join(str(error).split())
    except BaseException as problem:  # of the environment's class of exceptions
        reason = f"its text cannot be made: {type(problem).__name__}"
    if isinstance(error, CallFailed):
        return reason
    return f"{type(error).__name__}{': ' if reason else ''}{reason}"


def load(target: str) -> Any:
    """The object that `module:name` names."""
    module, _, name = target.partition(":")
    value: Any = importlib.import_module(module)
    for attribute in name.split("."):
        value = getattr(value, attribute)
    return value


def main() -> None:
    """Serve calls until the driver closes the socket."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, lines), name="environment-calls", daemon=True).start()
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    sys.path.insert(0, os.getcwd())
    sys.meta_path.append(_DriversCore(*sys.argv[2:3]))
    environment: BlockingCalls | None = None
    while True:
        request = json.loads(lines.get())
        reply: dict[str, Any] = {}
        try:
            if "describe" in request:
                reply["result"] = _description(request["describe"], request["options"])
            elif "create" in request:
                environment = BlockingCalls(partial(_create, request["create"], request["options"]))
            elif request["call"] == "close":
                if environment is not None:
                    environment.close()
                environment = None
            elif environment is not None:
                method, arguments = request["call"], request["arguments"]
                if method in ARGUMENTS:
                    arguments[-1] = argument_from(method, arguments[-1])
                result = environment(method, *arguments)
                reply = {"result": _plain(result), "type": type(result).__name__}
        except BaseException as error:  # user code may raise anything, SystemExit included
            reply = {"error": described(error), "trace": traceback.format_exc()}
        try:
            line = json.dumps(reply, allow_nan=False, default=_encodable)
        except (TypeError, ValueError) as error:
            line = json.dumps({"error": f"the result is not JSON: {described(error)}"})
        connection.sendall(line.encode() + b"\n")


class _DriversCore(importlib.machinery.PathFinder):
    """Finds `roll_core` in the driver's installation, and no other package of it."""

    def __init__(self, root: str = "") -> None:
        self._root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # type: ignore[override]
        """The package, once all other finders have not found it."""
        return importlib.machinery.PathFinder.find_spec(name, [self._root]) if name == "roll_core" else None


def _create(target: str, options: dict[str, Any]) -> Any:
    return load(target)(**options)


def _description(target: str, options: dict[str, Any]) -> dict[str, Any]:
    """Facts about a class. Raises unless it has the methods of an environment and takes the options."""
    factory = load(target)
    missing = [name for name in ("reset", "step", "score", "close") if not callable(getattr(factory, name, None))]
    if missing:
        raise TypeError(f"{target} has no method {', '.join(missing)}")
    inspect.signature(factory).bind(**options)
    return {"reports_success": bool(getattr(factory, "reports_success", False))}


def argument_from(method: str, fields: dict[str, Any]) -> Any:
    """The last argument of `step` or `run` from the result of `wire_arguments`."""
    module, _, cls = ARGUMENTS[method].partition(":")
    try:
        return getattr(importlib.import_module(f"roll_core.spec.{module}"), cls)(**fields)
    except (ImportError, SyntaxError, TypeError):  # a Python that cannot read roll_core
        return SimpleNamespace(**fields)


def _plain(result: Any) -> Any:
    if not dataclasses.is_dataclass(result) or isinstance(result, type):
        return result
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}


def _encodable(value: Any) -> Any:
    """Images in messages as JSON values: bytes, images of Pillow, and `roll_core.types.Media`."""
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_instance and not callable(getattr(value, "read", None)):
        return _plain(value)
    if is_instance:
        value = value.read()
    elif callable(getattr(value, "convert", None)) and callable(getattr(value, "save", None)):
        file = io.BytesIO()
        value.save(file, "PNG", compress_level=1)
        value = file.getvalue()
    if isinstance(value, (bytes, bytearray)):
        return {"base64": base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _read(connection: socket.socket, lines: queue.SimpleQueue[bytes]) -> None:
    """Queue incoming lines. When the connection closes, kills this process and all that the environment started."""
    # A driver that is killed before it read a reply resets the connection.
    with contextlib.suppress(ConnectionError), connection.makefile("rb") as stream:
        for line in stream:
            lines.put(line)
    if os.getpgrp() == os.getpid():  # `start_process` gave it a session of its own
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
