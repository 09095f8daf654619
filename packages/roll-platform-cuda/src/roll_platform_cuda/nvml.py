"""Reads NVIDIA's driver and devices through NVML, which creates no CUDA context and uses no device memory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.spec.platform import visible_devices

if TYPE_CHECKING:
    from collections.abc import Iterator

VISIBLE = "CUDA_VISIBLE_DEVICES"
GIB = 1024**3


class NoDriverError(Exception):
    """NVIDIA's driver cannot be reached; the message is NVML's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaDevice:
    """One device that this process may use."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    """0 if the driver does not report it, on hosts whose GPU shares the host's memory."""
    used_bytes: int
    """Memory in use by all processes; 0 if the driver does not report it."""

    def __str__(self) -> str:
        memory = f", {self.total_bytes / GIB:.0f} GiB" if self.total_bytes else ""
        return f"{self.name} (compute capability {dotted(self.capability)}{memory})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Driver and devices of a host, as the driver reports them."""

    driver: str
    """Version of the driver, for example `570.86.15`."""
    cuda: tuple[int, int]
    """Newest CUDA version that the driver supports, as (major, minor)."""
    num_installed: int
    devices: tuple[NvidiaDevice, ...]
    """Devices in `CUDA_VISIBLE_DEVICES`, in its order; if it is not set, all devices by PCI address."""


def survey() -> Survey:
    """Read driver and visible devices. Raises `NoDriverError` if NVML fails."""
    with _session() as nvml:
        version = int(nvml.nvmlSystemGetCudaDriverVersion())
        count = int(nvml.nvmlDeviceGetCount())
        return Survey(
            driver=str(nvml.nvmlSystemGetDriverVersion()),
            cuda=(version // 1000, version % 1000 // 10),
            num_installed=count,
            devices=tuple(_device(nvml, handle) for handle in _handles(nvml, count)),
        )


def dotted(version: tuple[int, int]) -> str:
    """Format a version or compute capability, for example `8.0`."""
    return f"{version[0]}.{version[1]}"


@contextlib.contextmanager
def _session() -> Iterator[Any]:
    """Initialise NVML, which keeps its device files open, and shut it down at the end."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NoDriverError(str(error)) from error


def _handles(nvml: Any, count: int) -> Iterator[Any]:
    everything = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    for entry in visible_devices(os.environ.get(VISIBLE), count):
        if entry.isdigit():
            yield everything[int(entry)]
        elif entry.startswith("MIG-"):
            yield nvml.nvmlDeviceGetHandleByUUID(entry)
        else:  # CUDA accepts a unique prefix of a UUID
            matching = [handle for handle in everything if str(nvml.nvmlDeviceGetUUID(handle)).startswith(entry)]
            if len(matching) != 1:
                return
            yield matching[0]


def _device(nvml: Any, handle: Any) -> NvidiaDevice:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, used = int(memory.total), int(memory.used)
    except nvml.NVMLError_NotSupported:
        total = used = 0
    return NvidiaDevice(
        name=str(nvml.nvmlDeviceGetName(handle)),
        capability=_capability(nvml, handle),
        total_bytes=total,
        used_bytes=used,
    )


def _capability(nvml: Any, handle: Any) -> tuple[int, int]:
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):  # MIG: use the whole device
        full_device = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(full_device)
    return int(major), int(minor)
