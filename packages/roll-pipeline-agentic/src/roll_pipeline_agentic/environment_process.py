"""Process that runs environments, one after the other. The driver starts it with the number of a connected socket.

    driver                                     this process
      {"create": "module:Class", "options"}  ►  instance
      {"call": "step", "arguments"}          ►  {"result"} or {"error", "trace"}
      {"call": "close"}                      ►  {"result"}; then the next create

Lines of JSON in both directions. When the driver exits, the socket closes and this process ends, also during a call.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import socket
import sys
import threading
import traceback
from functools import partial
from typing import Any


def main() -> None:
    """Serve calls until the driver closes the socket."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, lines), name="environment-calls", daemon=True).start()
    sys.path.insert(0, os.getcwd())
    from roll_pipeline_agentic.calls import BlockingCalls, arguments_from, described, wire_result

    environment: BlockingCalls | None = None
    while True:
        request = json.loads(lines.get())
        reply: dict[str, Any] = {}
        try:
            if "create" in request:
                environment = BlockingCalls(partial(_create, request["create"], request["options"]))
            elif request["call"] == "close":
                if environment is not None:
                    environment.close()
                environment = None
            elif environment is not None:
                method = request["call"]
                result = environment(method, *arguments_from(method, request["arguments"]))
                reply["result"] = wire_result(method, result)
        except BaseException as error:  # user code may raise anything, SystemExit included
            reply = {"error": described(error), "trace": traceback.format_exc()}
        try:
            line = json.dumps(reply, allow_nan=False)
        except (TypeError, ValueError) as error:
            line = json.dumps({"error": f"the result is not JSON: {described(error)}"})
        connection.sendall(line.encode() + b"\n")


def _create(target: str, options: dict[str, Any]) -> Any:
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for each in name.split("."):
        found = getattr(found, each)
    return found(**options)


def _read(connection: socket.socket, lines: queue.SimpleQueue[bytes]) -> None:
    """Queue incoming lines. Ends the process when the connection closes."""
    with connection.makefile("rb") as stream:
        for line in stream:
            lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
