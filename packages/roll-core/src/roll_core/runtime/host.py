"""What this host gives to this process: cores and memory, within the limits of its affinity and its cgroup."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CGROUPS = Path("/sys/fs/cgroup")


def hostname() -> str:
    """Name of this host, as errors and logs show it."""
    return socket.gethostname()


def interface_of(address: str) -> str:
    """The network interface that has this IP address, empty if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        # Link-local addresses of IPv6 are given with their interface: fe80::1%eth0.
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return ""


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its cgroup rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _cpu_quotas()]
    return max(1, min([cores, *quotas]))


def memory_limit_bytes() -> int | None:
    """What the cgroup allows, if it limits memory."""
    limits = [int(text) for text in _cgroup_values("memory.max", "memory/memory.limit_in_bytes") if text.isdigit()]
    return min(limits, default=None)


def num_oom_kills() -> int:
    """Processes that the kernel killed for want of memory since it started; 0 where it does not say."""
    counts = dict(line.split(maxsplit=1) for line in _text(Path("/proc/vmstat")).splitlines())
    return int(counts.get("oom_kill", 0))


def _cpu_quotas() -> Iterator[float]:
    """Cores by quota over period, of this cgroup and those above it."""
    for text in _cgroup_values("cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)
    for directory in (CGROUPS / "cpu", CGROUPS / "cpu,cpuacct"):
        quota, period = _text(directory / "cpu.cfs_quota_us"), _text(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _cgroup_values(name: str, older: str = "") -> Iterator[str]:
    """A control file's text in this process's cgroup and in all above it (version 2), or in the mount (version 1)."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":
            here = CGROUPS / path.lstrip("/")
            for directory in (here, *here.parents):
                if directory.is_relative_to(CGROUPS):
                    yield _text(directory / name)
    if older:
        yield _text(CGROUPS / older)


def _text(path: Path) -> str:
    """Empty where the file is not there or not ours to read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
