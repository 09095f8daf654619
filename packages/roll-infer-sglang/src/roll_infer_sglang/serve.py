"""Server process: `python -m roll_infer_sglang.serve`, with SGLang's arguments as JSON on standard input.

The worker keeps standard input open while it is alive. When standard input closes, this process kills its whole process
group. SGLang's processes always end by SIGKILL, so the shared memory that they would unlink is unlinked before.

This process writes its ready message as JSON to the file descriptor given in the input; its standard output is
SGLang's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from roll_infer_sglang.hooks import AFTER_SETTINGS, BEFORE_REQUEST, fork_processes, guard_routes, reject_foreign_code
from roll_infer_sglang.registration import ON_CPU

if TYPE_CHECKING:
    from collections.abc import Iterable

SEGMENTS = tuple(f"/dev/shm/{prefix}" for prefix in ("sglang_loads_", "sgl_shm_", "psm_", "torch_"))
"""Path prefixes of shared memory: of SGLang, of Python's `SharedMemory` and of torch."""
POLL_S = 0.05
"""Seconds between two checks whether the server accepts connections."""


def main() -> None:
    """Run the server until it is killed; returns at once if SGLang does not know some of the arguments."""
    message: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_worker, daemon=True).start()
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(BEFORE_REQUEST, reject_foreign_code, HookType.BEFORE)
    if os.environ.get(ON_CPU):
        HookRegistry.register(AFTER_SETTINGS, fork_processes, HookType.AFTER)
    load_plugins()
    from sglang.srt.entrypoints.http_server import app, launch_server
    from sglang.srt.server_args import ServerArgs

    from roll_infer_sglang.sampler import ParamsProcessor

    guard_routes(app)

    def reply(**values: Any) -> None:
        with os.fdopen(message.pop("ready"), "w", encoding="utf-8") as pipe:
            json.dump(values, pipe)

    def close_copy() -> None:
        if "ready" in message:  # the worker reads until no process can write any more
            os.close(message["ready"])

    os.register_at_fork(after_in_child=close_copy)
    known = set(ServerArgs.__struct_fields__)
    arguments: dict[str, Any] = message["arguments"]
    if not arguments.keys() <= known:
        reply(known=sorted(known))
        return
    launch_server(
        ServerArgs(**arguments),
        execute_warmup_func=_wait_until_open,
        launch_callback=lambda: reply(logit_processor=ParamsProcessor.to_str()),
    )


def _wait_until_open(server_args: Any) -> bool:
    """Replacement for SGLang's warm-up, whose prompt does not fit small vocabularies and contexts. Returns True."""
    import requests
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    while True:
        try:
            requests.get(f"{server_args.url()}/model_info", timeout=5)
            break
        except requests.RequestException:
            time.sleep(POLL_S)
    get_global_state().tokenizer_manager.server_status = ServerStatus.Up
    return True


def _exit_with_worker() -> None:
    while os.read(0, 4096):
        pass
    this = psutil.Process()
    unlink_segments([this, *this.children(recursive=True)])
    os.killpg(os.getpgid(0), signal.SIGKILL)


def unlink_segments(processes: Iterable[psutil.Process]) -> None:
    """Unlink the shared memory of processes that are about to be killed. They can still use it."""
    paths: set[str] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):  # it has exited
            paths.update(file.path for file in process.open_files())
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
            paths.update(line.split(maxsplit=5)[-1] for line in maps.splitlines())
    for path in paths:
        if path.startswith(SEGMENTS):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


if __name__ == "__main__":
    main()
