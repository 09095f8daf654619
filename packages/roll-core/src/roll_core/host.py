"""CPU cores and memory that this process may use, within its CPU affinity and cgroup limits."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CGROUPS = Path("/sys/fs/cgroup")
PORTS = range(20_000, 32_000)
"""Below the usual ranges of ephemeral ports, so that no outgoing connection takes a chosen port."""


def hostname() -> str:
    """Name of this host, as shown in errors and logs."""
    return socket.gethostname()


def free_port() -> int:
    """A free port of this host, reserved until this process ends. Raises `OSError` if 100 random ports are in use.

    The reserving socket is bound but does not listen: torch's stores, which set SO_REUSEADDR, can bind the same port,
    and no other worker of this host gets it.
    """
    for port in Random().sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.detach()  # stays open
            return port
    raise OSError(f"none of 100 random ports between {PORTS.start} and {PORTS.stop} is free")


def usable_cores() -> int:
    """Number of cores this process may use: the minimum of its CPU affinity and its cgroup's CPU quota, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _cpu_quotas()]
    return max(1, min([cores, *quotas]))


def memory_limit_bytes() -> int | None:
    """Lowest memory limit of the process's cgroups in bytes; None without a limit."""
    return min((limit for limit, _ in _memory_limits()), default=None)


def free_memory_bytes() -> int:
    """Bytes this process may still allocate: available memory of the host, or less if a cgroup limit is closer.

    File-backed pages count as free: the kernel drops them before it rejects an allocation.
    """
    import psutil

    left = [max(0, limit - used) for limit, used in _memory_limits()]
    return min([int(psutil.virtual_memory().available), *left])


def _cpu_quotas() -> Iterator[float]:
    """Number of cores (quota / period) of each cgroup of this process with a CPU quota, including parents."""
    for group in _cgroups(""):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)
    for directory in (CGROUPS / "cpu", CGROUPS / "cpu,cpuacct"):
        quota, period = _text(directory / "cpu.cfs_quota_us"), _text(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Limit and used bytes of each cgroup of this process that has a memory limit."""
    for group in _cgroups(""):
        yield from _memory_limit(group, "max", "current", "")
    for group in (*_cgroups("memory"), CGROUPS / "memory"):
        yield from _memory_limit(group, "limit_in_bytes", "usage_in_bytes", "total_")


def _memory_limit(group: Path, limit: str, usage: str, total: str) -> Iterator[tuple[int, int]]:
    """Limit and used bytes of one cgroup, if it has a limit. `total` is the prefix of counts that include child
    cgroups."""
    allowed, used = _text(group / f"memory.{limit}"), _text(group / f"memory.{usage}")
    if not allowed.isdigit():
        return
    counts = dict(line.partition(" ")[::2] for line in _text(group / "memory.stat").splitlines())
    of_files = [counts.get(f"{total}{state}_file", "") for state in ("active", "inactive")]
    dropped = sum(int(number) for number in of_files if number.isdigit())
    yield int(allowed), max(0, int(used) - dropped) if used.isdigit() else 0


def _cgroups(controller: str) -> Iterator[Path]:
    """This process's cgroup and its parents: cgroup v2, or the given controller of v1. In a container, the paths may be
    those of the host, and only the topmost directory exists."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top = CGROUPS / controllers
            here = top / path.lstrip("/")
            yield from (folder for folder in (here, *here.parents) if folder.is_relative_to(top))


def _text(path: Path) -> str:
    """Stripped content of a file; empty if it is missing or not readable."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
