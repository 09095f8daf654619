"""What NVIDIA's driver says of its devices, asked by NVML: no CUDA context is made and no device memory taken."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.spec.visible import visible_devices

if TYPE_CHECKING:
    from collections.abc import Iterator

VISIBLE = "CUDA_VISIBLE_DEVICES"
GIB = 1024**3


class NoDriverError(Exception):
    """No driver answers; the message is NVML's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device that this process may use."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    """0, like the next, where the driver does not count: on hosts whose GPU shares the host's memory."""
    used_bytes: int

    def __str__(self) -> str:
        memory = f", {self.total_bytes / GIB:.0f} GiB" if self.total_bytes else ""
        return f"{self.name} (compute capability {dotted(self.capability)}{memory})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A host, as its driver describes it."""

    driver: str
    """Version, `570.86.15`."""
    cuda: tuple[int, int]
    """The newest CUDA that the driver can run."""
    num_installed: int
    devices: tuple[Device, ...]
    """Those that `CUDA_VISIBLE_DEVICES` leaves, in its order; all of them where it is not set, by PCI address."""


def survey() -> Survey:
    """Look. Raises `NoDriverError`."""
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
    """`8.0`."""
    return f"{version[0]}.{version[1]}"


@contextlib.contextmanager
def _session() -> Iterator[Any]:
    """NVML, which keeps its device files open from the first line to the last."""
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
        else:  # the beginning of an id is enough for CUDA
            matching = [handle for handle in everything if str(nvml.nvmlDeviceGetUUID(handle)).startswith(entry)]
            if len(matching) != 1:
                return
            yield matching[0]


def _device(nvml: Any, handle: Any) -> Device:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, used = int(memory.total), int(memory.used)
    except nvml.NVMLError_NotSupported:
        total = used = 0
    return Device(
        name=str(nvml.nvmlDeviceGetName(handle)),
        capability=_capability(nvml, handle),
        total_bytes=total,
        used_bytes=used,
    )


def _capability(nvml: Any, handle: Any) -> tuple[int, int]:
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):  # part of a device (MIG): as the whole
        whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(whole)
    return int(major), int(minor)
