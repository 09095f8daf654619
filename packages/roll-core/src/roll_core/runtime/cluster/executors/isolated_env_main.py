"""Entry point of a worker process under its own interpreter: `isolated_env_main <socket descriptor> <settings>`.

Imports only the standard library until the first frame is sent. A broken environment can then be reported.
"""

from __future__ import annotations

import json
import os
import socket
import sys

from roll_core.runtime.cluster.executors.frames import HELLO, frame


def main() -> None:
    """Serve one worker until the other end of the socket closes."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    try:
        from roll_core.runtime.cluster.executors.isolated_env_worker import serve
    except BaseException as error:  # SystemExit included: any failure of the environment is reported
        said = f"importing roll-core failed: {type(error).__name__}: {error}"
        connection.sendall(frame(HELLO, 0, json.dumps({"error": said}).encode()))
        sys.exit(1)
    serve(connection, settings)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine may have left non-daemon threads that do not end


if __name__ == "__main__":
    main()
