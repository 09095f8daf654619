"""How much memory a worker's process has taken at most, over what it held before it built anything.

Counted is memory that somebody wrote to: anonymous and shared pages. Pages of files, which are the libraries' code as
it comes to be used, are not: the kernel can drop them, and they say nothing of the model.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Makes the kernel count the peak from now on (proc(5))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Of one worker's process; workers of one process say the same of it."""

    host: str
    pid: int
    begun_bytes: int
    """When the worker began to build."""
    peak_bytes: int
    """At most since then."""
    device_bytes: int | None = None
    """At most on the worker's accelerator, by torch's allocator; None on the host."""


class MemoryWatch:
    """Begun before a worker builds anything."""

    def __init__(self, device: str) -> None:
        self._device, self._begun = device, _now()[0]

    def use(self) -> MemoryUse | None:
        """Until now; None where the system does not count."""
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
    """Count the peak of this process from now on: a run before this one had its own."""
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return  # it is not the kernel's, or not ours: the peak is then that of all runs of this process


def _now() -> tuple[int, int]:
    """Bytes that are anonymous or shared, and the most that they have been; 0 where nobody counts them."""
    try:
        lines = STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0, 0
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    held = {name: int(found.get(name, "0").split()[0]) << 10 for name in ("RssAnon", "RssShmem", "RssFile", "VmHWM")}
    return held["RssAnon"] + held["RssShmem"], max(0, held["VmHWM"] - held["RssFile"])


def _on_device(device: str) -> int | None:
    if device == "cpu":
        return None
    import torch

    try:
        return int(torch.accelerator.max_memory_allocated(device))
    except (AttributeError, RuntimeError):  # a torch that does not count, or a device that was never opened
        return None
