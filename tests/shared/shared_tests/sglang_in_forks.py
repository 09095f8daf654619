"""Imports SGLang once for all forked processes: its server then starts in seconds. Importing this module is enough.

The server is forked from the worker instead of started as a program. On an accelerator this is not possible.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from subprocess import TimeoutExpired
from typing import Any

from torch.utils._device import _device_constructors

_device_constructors()  # cached before a stand-in wraps some of them: `with torch.device` applies to those in the cache

import sglang.srt.entrypoints.http_server  # noqa: E402
import sglang.srt.managers.detokenizer_manager  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402, F401

from roll_infer_sglang import serve, server  # noqa: E402


class Forked:
    """The part of `subprocess.Popen` that `SglangServer` uses."""

    def __init__(self, command: list[str], *, env: dict[str, str], **options: Any) -> None:
        assert command[-1] == serve.__name__
        reading, writing = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            os.close(reading)
            self.stdin = os.fdopen(writing, "wb")
            return
        try:
            os.setsid()
            os.dup2(reading, 0)
            os.close(reading)
            os.close(writing)
            os.environ.clear()
            os.environ.update(env)
            sys.stdin = os.fdopen(0)
            serve.main()
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutExpired(serve.__name__, timeout)
            time.sleep(0.02)
        return code


class Subprocess:
    """Module `subprocess` of `roll_infer_sglang.server`."""

    PIPE = -1
    Popen = Forked
    TimeoutExpired = TimeoutExpired


vars(server)["subprocess"] = Subprocess
