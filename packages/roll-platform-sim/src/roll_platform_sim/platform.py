"""The `sim` platform: simulated devices in the host's memory."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import roll_platform_sim
from roll_core.errors import UnsupportedError
from roll_core.spec.platform import Platform, Probe
from roll_platform_sim import settings
from roll_platform_sim.device import is_compiled

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = ("fp32", "bf16", "fp16")


class SimPlatform(Platform):
    """Simulated devices, as many as `ROLL_SIM_DEVICES` says. Importing torch also registers them."""

    name = "sim"
    device_type = "sim"
    resource_name = "SIM"
    visible_devices = settings.VISIBLE
    collective_backend = "simccl"

    def probe(self) -> Probe:
        """Count the devices that the environment describes."""
        num, why = _usable()
        return Probe(found=num > 0, why=why)

    def device_count(self) -> int:
        """Number of simulated devices that are visible to this process; 0 if they cannot be compiled."""
        return _usable()[0]

    def supports(self, dtype: str) -> str:
        """Empty for the dtypes that CPUs compute in."""
        return "" if dtype in DTYPES else f"{dtype} is not supported on simulated devices: use {', '.join(DTYPES)}"

    def memory(self, local_index: int) -> Mapping[str, int]:
        """Bytes `total` and `used`: what all processes of the simulated host have reserved.

        Raises `UnsupportedError` if there is no such device.
        """
        num, why = _usable()
        if local_index >= num:
            raise UnsupportedError(f"cannot read the memory of {self.device(local_index)}; found: {why}")
        import torch

        free, total = torch.get_device_module("sim").mem_get_info(local_index)
        return {"total": int(total), "used": int(total - free)}


def _usable() -> tuple[int, str]:
    """Number of devices that torch can use, and a description of what was found."""
    try:
        num, gib = settings.num_devices(), settings.memory_bytes() / 1024**3
    except UnsupportedError as error:
        return 0, str(error)
    if not num:
        return 0, f"{settings.DEVICES} is not set: set it to the number of simulated devices"
    visible = len(settings.visible(settings.VISIBLE, num))
    if not visible:
        return 0, f"{settings.VISIBLE} hides all of {num} simulated devices"
    if roll_platform_sim.failure:
        lines = roll_platform_sim.failure.splitlines()
        return 0, " ".join(dict.fromkeys([lines[0], lines[-1]]))
    compiler = os.environ.get("CXX", "c++")
    if not is_compiled() and shutil.which(compiler) is None:
        return 0, f"simulated devices are compiled on first use, but there is no {compiler}: install g++, or set CXX"
    return visible, f"{visible} simulated devices of {gib:g} GiB in this host's memory"
