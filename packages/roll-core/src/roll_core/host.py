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
    return min((limit for limit, _ in _memory_limits()), default=None)


def free_memory_bytes() -> int:
    """What this process may still take: what the host has to give, or less where a cgroup leaves less of its limit.

    Pages that hold what stands in files too are not in use: the kernel drops them before it refuses anything.
    """
    import psutil

    left = [max(0, limit - used) for limit, used in _memory_limits()]
    return min([int(psutil.virtual_memory().available), *left])


def num_oom_kills() -> int:
    """Processes that the kernel killed for want of memory since it started; 0 where it does not say."""
    counts = dict(line.split(maxsplit=1) for line in _text(Path("/proc/vmstat")).splitlines())
    return int(counts.get("oom_kill", 0))


def _cpu_quotas() -> Iterator[float]:
    """Cores by quota over period, of this cgroup and those above it."""
    for group in _cgroups(""):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)
    for directory in (CGROUPS / "cpu", CGROUPS / "cpu,cpuacct"):
        quota, period = _text(directory / "cpu.cfs_quota_us"), _text(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Bytes that are allowed and bytes in use, of each cgroup of this process that has a limit."""
    for group in _cgroups(""):
        yield from _memory_limit(group, "max", "current", "")
    for group in (*_cgroups("memory"), CGROUPS / "memory"):
        yield from _memory_limit(group, "limit_in_bytes", "usage_in_bytes", "total_")


def _memory_limit(group: Path, limit: str, usage: str, total: str) -> Iterator[tuple[int, int]]:
    """`total` stands before the counts that include the cgroups below."""
    allowed, used = _text(group / f"memory.{limit}"), _text(group / f"memory.{usage}")
    if not allowed.isdigit():
        return
    counts = dict(line.partition(" ")[::2] for line in _text(group / "memory.stat").splitlines())
    of_files = [counts.get(f"{total}{state}_file", "") for state in ("active", "inactive")]
    dropped = sum(int(each) for each in of_files if each.isdigit())
    yield int(allowed), max(0, int(used) - dropped) if used.isdigit() else 0


def _cgroups(controller: str) -> Iterator[Path]:
    """This process's cgroup and all above it: of version 2, or of a controller of version 1. In a container they may
    bear names of the host, and only the topmost is there."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top = CGROUPS / controllers
            here = top / path.lstrip("/")
            yield from (each for each in (here, *here.parents) if each.is_relative_to(top))


def _text(path: Path) -> str:
    """Empty where the file is not there or not ours to read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
