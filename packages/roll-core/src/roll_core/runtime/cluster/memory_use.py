"""Peak memory of a worker's process, less its memory before the worker was built.

Only anonymous and shared pages count. Pages of files, such as the code of libraries, do not count: the kernel can drop
them, and their number does not depend on the model.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Value that resets the kernel's peak counter (proc(5))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of one worker's process. Workers that share a process report the same numbers."""

    host: str
    pid: int
    begun_bytes: int
    """Anonymous and shared memory before the worker was built."""
    peak_bytes: int
    """Peak of the anonymous and shared memory since then."""
    device_bytes: int | None = None
    """Peak on the worker's accelerator that other processes could not use: what torch's allocator reserved, freed
    memory that it keeps included. None on the host."""


class MemoryWatch:
    """Measures a process from before its worker is built."""

    def __init__(self, device: str) -> None:
        self._device, self._begun = device, _now()[0]

    def use(self) -> MemoryUse | None:
        """Memory use until now; None if the system does not report it."""
        anonymous, peak = _now()
        if not peak:
            return None
        return MemoryUse(
            host=socket.gethostname(),
            pid=os.getpid(),
            begun_bytes=self._begun,
            peak_bytes=max(peak, anonymous),
            device_bytes=_on_device(self._device),
        )


def forget_peak() -> None:
    """Reset the peaks of this process on the host and on its devices, so that an earlier run in it does not count.

    A counter that cannot be reset keeps the peak of all runs of this process.
    """
    with contextlib.suppress(OSError):  # not Linux, or no permission
        CLEAR.write_text(RESET_PEAK)
    if "torch" not in sys.modules:
        return
    import torch

    with contextlib.suppress(AttributeError, RuntimeError):  # a third party's device module without these counters
        kind = torch.accelerator.current_accelerator()
        # torch counts devices once, and this run may make others visible: none are counted before the first use.
        if kind is not None and torch.get_device_module(kind).is_initialized():
            for index in range(torch.accelerator.device_count()):
                torch.accelerator.reset_peak_memory_stats(index)


def _now() -> tuple[int, int]:
    """Anonymous plus shared bytes now, and their approximate peak; 0 if the system does not report them."""
    try:
        lines = STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    held = {name: int(fields.get(name, "0").split()[0]) << 10 for name in ("RssAnon", "RssShmem", "RssFile", "VmHWM")}
    return held["RssAnon"] + held["RssShmem"], max(0, held["VmHWM"] - held["RssFile"])


def _on_device(device: str) -> int | None:
    if device == "cpu":
        return None
    import torch

    try:
        return int(torch.accelerator.max_memory_reserved(device))
    except RuntimeError:  # a device that was never initialized
        return None


def by_process(measured: Mapping[str, Iterable[MemoryUse | None]]) -> list[dict[str, Any]]:
    """One row per process: its roles and ranks, and measured bytes on host and device.

    `measured` maps each role to its memory in the order of ranks, with None for unknown.
    """
    processes: defaultdict[tuple[str, int], list[tuple[str, int, MemoryUse]]] = defaultdict(list)
    for role, uses in measured.items():
        for rank, use in enumerate(uses):
            if use is not None:
                processes[use.host, use.pid].append((role, rank, use))
    rows = []
    for (host, pid), workers in processes.items():
        begun = min(use.begun_bytes for _, _, use in workers)
        devices = [use.device_bytes for _, _, use in workers if use.device_bytes is not None]
        rows.append(
            {
                "roles": list(dict.fromkeys(role for role, _, _ in workers)),
                "ranks": [rank for _, rank, _ in workers],
                "host": host,
                "pid": pid,
                "measured_bytes": max(0, max(use.peak_bytes for _, _, use in workers) - begun),
                "device_measured_bytes": max(devices) if devices else None,
            }
        )
    return rows
