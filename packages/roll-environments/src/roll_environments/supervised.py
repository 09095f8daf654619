"""Runs a command, and kills it with all that it started once the process that asked for it has exited.

    python supervised.py PARENT_PID COMMAND...

An environment process that is killed at a deadline cannot stop the servers it started. This process can: it compares
its parent with PARENT_PID. Standard input and output are those of the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

INTERVAL_S = 0.2
"""Seconds between two looks at the parent."""


def supervised(command: list[str]) -> list[str]:
    """The command line that runs `command` under supervision by this process."""
    return [sys.executable, "-P", __file__, str(os.getpid()), *command]


def main() -> int:
    """Run the command. Returns its exit code."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if os.getpgrp() != os.getpid():
        os.setsid()
    # A SIGTERM of the group reaches the command, which may take its time: this process ends after it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(command)
    while True:
        try:
            code = child.wait(timeout=INTERVAL_S)
            break
        except subprocess.TimeoutExpired:
            if os.getppid() != parent:
                os.killpg(os.getpgrp(), signal.SIGKILL)  # this process, too
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGTERM)  # what the command left behind
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
