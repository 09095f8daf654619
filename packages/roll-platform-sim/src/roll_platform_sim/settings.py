"""Environment variables that describe the simulated devices of this host. Does not import torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from roll_core.errors import UnsupportedError
from roll_core.spec.platform import visible_devices

DEVICES = "ROLL_SIM_DEVICES"
"""Number of simulated devices of this host; by default none."""
MEMORY_GIB = "ROLL_SIM_MEMORY_GIB"
"""Memory of each device in GiB; may be a fraction."""
HOST = "ROLL_SIM_HOST"
"""Name of the simulated host: processes with the same name share the memory of its devices. By default the user's."""
VISIBLE = "ROLL_SIM_VISIBLE_DEVICES"
"""Devices that a process uses, as in `CUDA_VISIBLE_DEVICES`."""
TRACE = "ROLL_SIM_TRACE"
"""Path to which each process appends its process id, and writes its events when it exits; see `Trace`."""

MAX_DEVICES = 16
DEFAULT_MEMORY_GIB = 2.0


def num_devices() -> int:
    """Number of simulated devices of this host. Raises `UnsupportedError`."""
    value = os.environ.get(DEVICES, "0")
    if not (value.isascii() and value.isdigit() and int(value) <= MAX_DEVICES):
        raise UnsupportedError(f"{DEVICES}={value}: expected a number of devices from 0 to {MAX_DEVICES}")
    return int(value)


def visible(variable: str, num: int) -> list[int]:
    """Numbers on the host of the devices that `variable` makes visible, in the process's order."""
    return [int(index) for index in visible_devices(os.environ.get(variable), num) if index.isdigit()]


def memory_bytes() -> int:
    """Memory of each device. Raises `UnsupportedError`."""
    value = os.environ.get(MEMORY_GIB, str(DEFAULT_MEMORY_GIB))
    try:
        size = int(float(value) * 1024**3)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise UnsupportedError(f"{MEMORY_GIB}={value}: expected GiB as a positive number, such as 0.5")
    return size


def table(host: str = "") -> Path:
    """File in which the processes of a simulated host, by default this one's, count their memory."""
    shared = Path("/dev/shm")
    folder = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return folder / f"roll-sim-{os.getuid()}-{host or os.environ.get(HOST, 'default')}"
