"""The `cuda` platform: NVIDIA GPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from roll_core.errors import UnsupportedError
from roll_core.spec.platform import EnvVar, Platform, Probe, torch_build
from roll_platform_cuda.nvml import VISIBLE, NoDriverError, NvidiaDevice, dotted, survey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.platform import RoleKind

FLOORS = {"fp32": (6, 0), "fp16": (6, 0), "bf16": (8, 0)}
"""Minimum compute capability for each model dtype: 6.0 is Pascal, 8.0 is Ampere."""
FP8 = (8, 9)
"""Minimum compute capability for fp8 matrix products: 8.9 is Ada. fp8 is not a dtype of models."""

DEVICE_ORDER = EnvVar(
    name="CUDA_DEVICE_ORDER",
    value="PCI_BUS_ID",
    reason="CUDA lists the fastest device first, but Ray and NVML sort devices by PCI address. If devices differ,"
    " a worker would use another device than the one reserved for it",
    required=True,
)
CUMEM = EnvVar(
    name="NCCL_CUMEM_ENABLE",
    value="0",
    reason="trainers and engines form one group to send weights, which hangs if they use different values; engines set"
    " different values",
)
NVLS = EnvVar(
    name="NCCL_NVLS_ENABLE",
    value="0",
    reason="NVLink SHARP reserves buffers per communicator, which stay allocated while another role uses the device",
)
COMPILE_THREADS = EnvVar(
    name="TORCHINDUCTOR_COMPILE_THREADS",
    value="2",
    reason="otherwise each worker starts a compiler process per core, and a node has a worker for each device and role",
)
EXPANDABLE = EnvVar(
    name="PYTORCH_CUDA_ALLOC_CONF",
    value="expandable_segments:True",
    reason="micro-batches of different lengths fragment fixed segments until allocations fail despite free memory",
)
NOT_EXPANDABLE = EnvVar(
    name="PYTORCH_CUDA_ALLOC_CONF",
    value="expandable_segments:False",
    reason="engines that sleep release memory through their own allocator, which lacks support for expandable segments;"
    " this also overrides a value set in your shell",
    required=True,
)
ALLOC_CONF = "PYTORCH_ALLOC_CONF"
"""Other name of `PYTORCH_CUDA_ALLOC_CONF` in newer versions of torch, which ignore it if both are set."""


class CudaPlatform(Platform):
    """NVIDIA GPUs, found through their driver."""

    name = "cuda"
    device_type = "cuda"
    resource_name = "GPU"
    visible_devices = VISIBLE
    collective_backend = "nccl"

    def probe(self) -> Probe:
        """Look for devices; found if the driver reports one and the installed torch is built for CUDA."""
        devices, why = _usable()
        return Probe(found=bool(devices), why=why)

    def device_count(self) -> int:
        """Number of devices visible through `CUDA_VISIBLE_DEVICES`; 0 if torch cannot use them."""
        return len(_usable()[0])

    def supports(self, dtype: str) -> str:
        """Empty if every device's compute capability supports the dtype; otherwise the reason and alternatives."""
        floor = FP8 if dtype == "fp8" else FLOORS.get(dtype)
        if floor is None:
            return f"{dtype} is not a supported model dtype: use {', '.join(FLOORS)}"
        for device in _usable()[0]:
            if device.capability < floor:
                able = [dtype_name for dtype_name, least in FLOORS.items() if device.capability >= least]
                way_out = f"use {' or '.join(able)}" if able else "this device is too old"
                return (
                    f"{dtype} needs compute capability {dotted(floor)}, but {device.name} has"
                    f" {dotted(device.capability)}: {way_out}"
                )
        return ""

    def environment(self, kind: RoleKind, local_indices: Sequence[int]) -> tuple[EnvVar, ...]:
        """Variables for workers that compute on a device; reward workers get none."""
        if kind == "reward":
            return ()
        common = (DEVICE_ORDER, CUMEM, NVLS, COMPILE_THREADS)
        if kind == "generate":
            return (*common, NOT_EXPANDABLE)
        return common if ALLOC_CONF in os.environ else (*common, EXPANDABLE)

    def memory(self, local_index: int) -> Mapping[str, int]:
        """Bytes `total` and `used` of the whole device, by NVML; `used` includes other processes.

        Raises `UnsupportedError` if there is no such device, or if the driver does not report its memory.
        """
        devices, why = _usable()
        if local_index >= len(devices):
            raise UnsupportedError(f"cannot read the memory of {self.device(local_index)}; found: {why}")
        device = devices[local_index]
        if not device.total_bytes:
            raise UnsupportedError(f"the driver does not report the memory of {device.name}: it shares the host's")
        return {"total": device.total_bytes, "used": device.used_bytes}


def _usable() -> tuple[tuple[NvidiaDevice, ...], str]:
    """Devices that torch can use, and a description of what was found."""
    try:
        seen = survey()
    except NoDriverError as error:
        return (), f"NVIDIA's driver cannot be reached ({error})"
    if not seen.num_installed:
        return (), f"NVIDIA's driver {seen.driver} reports no device"
    if not seen.devices:
        hidden = os.environ.get(VISIBLE)
        return (), f"{VISIBLE}={hidden} hides all {seen.num_installed} NVIDIA devices"
    here = f"{_counted(seen.devices)}, driver {seen.driver}"
    build = torch_build()
    if build is None:
        return (), f"{here}; torch is not installed"
    if not build.cuda:
        return (), f"{here}; {build} does not support CUDA: install a torch for CUDA {dotted(seen.cuda)} or older"
    return seen.devices, f"{here}, {build}"


def _counted(devices: Sequence[NvidiaDevice]) -> str:
    """Describe devices, with equal ones grouped: `8 × NVIDIA H100 (…)`."""
    # Used memory differs between devices; it is not part of `str(device)`, so equal devices group.
    shown = [str(device) for device in devices]
    return ", ".join(f"{shown.count(name)} × {name}" for name in dict.fromkeys(shown))
