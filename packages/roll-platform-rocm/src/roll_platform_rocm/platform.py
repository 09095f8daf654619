"""The `rocm` platform: AMD GPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from roll_core.errors import UnsupportedError
from roll_core.spec.platform import EnvVar, Platform, Probe, torch_build
from roll_platform_rocm import kfd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.platform import RoleKind

DTYPES = ("fp32", "fp16", "bf16")
BF16_SINCE = (9, 0, 8)
"""gfx908 (Instinct MI100) is the first architecture with matrix instructions for bf16."""
WITHOUT_BF16 = 10
"""gfx10 (RDNA 1 and 2) is newer but has none."""

CUMEM = EnvVar(
    name="NCCL_CUMEM_ENABLE",
    value="0",
    reason="RCCL reads NCCL's variables: trainers and engines form one group to send weights and must use one value",
)
COMPILE_THREADS = EnvVar(
    name="TORCHINDUCTOR_COMPILE_THREADS",
    value="2",
    reason="otherwise each worker starts a compiler process per core, and a node has a worker for each device and role",
)


class RocmPlatform(Platform):
    """AMD GPUs, found in the kernel's topology. In torch their device type is `cuda`, and RCCL is called `nccl`."""

    name = "rocm"
    device_type = "cuda"
    resource_name = "GPU"
    visible_devices = kfd.HIP_VISIBLE
    also_visible_devices = (kfd.CUDA_VISIBLE,)
    collective_backend = "nccl"

    def probe(self) -> Probe:
        """Look for devices; found if this user may open a GPU and the installed torch is built for HIP."""
        devices, why = _usable()
        return Probe(found=bool(devices), why=why)

    def device_count(self) -> int:
        """Number of visible devices; 0 if torch cannot use them.

        `ROCR_VISIBLE_DEVICES` applies first, then `HIP_VISIBLE_DEVICES` or `CUDA_VISIBLE_DEVICES`.
        """
        return len(_usable()[0])

    def supports(self, dtype: str) -> str:
        """Empty if every device's instruction set supports the dtype; otherwise the reason and alternatives."""
        if dtype not in DTYPES:
            return f"{dtype} is not supported on AMD GPUs: use {', '.join(DTYPES)}"
        if dtype == "bf16":
            for device in _usable()[0]:
                if device.gfx < BF16_SINCE or device.gfx[0] == WITHOUT_BF16:
                    return f"bf16 needs gfx908 (MI100) or newer, or gfx11; found {device.name}: use fp16 or fp32"
        return ""

    def environment(self, kind: RoleKind, local_indices: Sequence[int]) -> tuple[EnvVar, ...]:
        """Variables for workers that compute on a device; reward workers get none."""
        return () if kind == "reward" else (CUMEM, COMPILE_THREADS)

    def memory(self, local_index: int) -> Mapping[str, int]:
        """Bytes `total` and `used` of the whole device, by the kernel's counters; `used` includes other processes.

        Raises `UnsupportedError` if there is no such device, or if the kernel does not report its memory.
        """
        devices, why = _usable()
        if local_index >= len(devices):
            raise UnsupportedError(f"cannot read the memory of {self.device(local_index)}; found: {why}")
        device = devices[local_index]
        if not device.total_bytes:
            raise UnsupportedError(f"the kernel does not report the memory of {device.name} (mem_info_vram_total)")
        return {"total": device.total_bytes, "used": device.used_bytes}


def _usable() -> tuple[tuple[kfd.AmdDevice, ...], str]:
    """Devices that torch can use, and a description of what was found."""
    if not kfd.KFD.exists():
        return (), f"no {kfd.KFD}: the amdgpu driver is not loaded, or the container was started without --device"
    installed = kfd.installed_devices()
    if not installed:
        return (), f"{kfd.KFD} exists, but the kernel reports no AMD GPU"
    devices = kfd.visible(installed)
    if not devices:
        return (), f"{kfd.hiding_variables()} hides all {len(installed)} AMD GPUs"
    shown = [str(device) for device in devices]
    here = ", ".join(f"{shown.count(name)} × {name}" for name in dict.fromkeys(shown))
    if not os.access(kfd.KFD, os.R_OK | os.W_OK):
        return (), f"{here}; this user has no permission to open {kfd.KFD}: join the group render (or video)"
    build = torch_build()
    if build is None:
        return (), f"{here}; torch is not installed"
    if not build.hip:
        return (), f"{here}; {build} does not support ROCm: install a torch for ROCm"
    return devices, f"{here}, {build}"
