"""The `npu` platform: Ascend NPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from roll_core.errors import UnsupportedError, install_command
from roll_core.spec.platform import EnvVar, Platform, Probe, torch_build
from roll_platform_npu import devices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.platform import RoleKind

DTYPES = ("fp32", "fp16", "bf16")
WITHOUT_BF16 = ("Ascend 310", "Ascend 310P", "Ascend 910")

CONNECT_TIMEOUT = EnvVar(
    name="HCCL_CONNECT_TIMEOUT",
    value="600",
    reason="by default HCCL's ranks must connect within two minutes, while other ranks may still load their model",
)
HOST_PORTS = EnvVar(
    name="HCCL_HOST_SOCKET_PORT_RANGE",
    value="auto",
    reason="the roles that share an NPU are several processes, which would all use the same ports of the host",
)
NPU_PORTS = EnvVar(
    name="HCCL_NPU_SOCKET_PORT_RANGE",
    value="auto",
    reason="the roles that share an NPU are several processes, which would all use the same ports of its network",
)
EXPANDABLE = EnvVar(
    name="PYTORCH_NPU_ALLOC_CONF",
    value="expandable_segments:True",
    reason="micro-batches of different lengths fragment fixed segments until allocations fail despite free memory",
)
NOT_EXPANDABLE = EnvVar(
    name="PYTORCH_NPU_ALLOC_CONF",
    value="expandable_segments:False",
    reason="engines that sleep release memory through their own allocator, which lacks support for expandable segments;"
    " this also overrides a value set in your shell",
    required=True,
)


class NpuPlatform(Platform):
    """Ascend NPUs, found by their device files. Importing torch also loads torch-npu."""

    name = "npu"
    device_type = "npu"
    resource_name = "NPU"
    visible_devices = devices.VISIBLE
    collective_backend = "hccl"

    def probe(self) -> Probe:
        """Look for devices; found if there are device files and a torch-npu that matches the installed torch."""
        num, why = _usable()
        return Probe(found=num > 0, why=why)

    def device_count(self) -> int:
        """Number of devices visible through `ASCEND_RT_VISIBLE_DEVICES`; 0 if torch cannot use them."""
        return _usable()[0]

    def supports(self, dtype: str) -> str:
        """Empty if this host's chips support the dtype; otherwise the reason and alternatives."""
        if dtype not in DTYPES:
            return f"{dtype} is not supported on Ascend NPUs: use {', '.join(DTYPES)}"
        old = [chip for chip in devices.chips() if chip in WITHOUT_BF16] if dtype == "bf16" else []
        return f"bf16 needs an Ascend 910B or newer; found {old[0]}: use fp16 or fp32" if old else ""

    def environment(self, kind: RoleKind, local_indices: Sequence[int]) -> tuple[EnvVar, ...]:
        """Variables for workers that compute on a device; reward workers get none."""
        if kind == "reward":
            return ()
        return (CONNECT_TIMEOUT, HOST_PORTS, NPU_PORTS, NOT_EXPANDABLE if kind == "generate" else EXPANDABLE)

    def memory(self, local_index: int) -> Mapping[str, int]:
        """Bytes `total` and `used` of the whole device.

        Only the NPU runtime reports them, so the calling process opens the device. Raises `UnsupportedError` if there
        is no such device.
        """
        num, why = _usable()
        if local_index >= num:
            raise UnsupportedError(f"cannot read the memory of {self.device(local_index)}; found: {why}")
        import torch

        free, total = torch.get_device_module("npu").mem_get_info(local_index)
        return {"total": int(total), "used": int(total - free)}


def _usable() -> tuple[int, str]:
    """Number of devices that torch can use, and a description of what was found."""
    installed = devices.num_installed()
    if not installed:
        return 0, f"no {devices.DEV}/davinci0: there is no Ascend NPU, or its driver is not loaded"
    num = devices.num_visible()
    chips = ", ".join(devices.chips()) or "Ascend NPU"
    if not num:
        return 0, f"{devices.VISIBLE}={os.environ.get(devices.VISIBLE)} hides all devices ({installed} × {chips})"
    here = f"{num} × {chips}"
    build, version = torch_build(), devices.torch_npu_version()
    if build is None:
        return 0, f"{here}; torch is not installed"
    release = _release(build.version)
    command = install_command(f"torch-npu=={release}.*")
    if not version:
        return 0, f"{here}; torch-npu is not installed: {command}"
    if _release(version) != release:
        return 0, f"{here}; torch-npu {version} does not match torch {build.version}: {command}"
    return num, f"{here}, torch {build.version}, torch-npu {version}"


def _release(version: str) -> str:
    """Major and minor version, which torch and torch-npu share: `2.13` for `2.13.0.post1+cpu`."""
    return ".".join(version.split("+")[0].split(".")[:2])
