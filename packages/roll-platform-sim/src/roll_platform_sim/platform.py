"""The `sim` platform: simulated devices in the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.errors import UnsupportedError
from roll_core.spec.platform import Platform, Probe
from roll_platform_sim import settings

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
        num, visible = settings.num_devices(), self.device_count()
        if not num:
            return Probe(found=False, why=f"{settings.DEVICES} is not set: set it to the number of simulated devices")
        if not visible:
            return Probe(found=False, why=f"{settings.VISIBLE} hides all of {num} simulated devices")
        gib = settings.memory_bytes() / 1024**3
        return Probe(found=True, why=f"{visible} simulated devices of {gib:g} GiB in this host's memory")

    def device_count(self) -> int:
        """Number of simulated devices that are visible to this process."""
        return len(settings.visible(settings.VISIBLE, settings.num_devices()))

    def supports(self, dtype: str) -> str:
        """Empty for the dtypes that CPUs compute in."""
        return "" if dtype in DTYPES else f"{dtype} is not supported on simulated devices: use {', '.join(DTYPES)}"

    def memory(self, local_index: int) -> Mapping[str, int]:
        """Bytes `total` and `used`: what all processes of the simulated host have reserved.

        Raises `UnsupportedError` if there is no such device.
        """
        if local_index >= self.device_count():
            raise UnsupportedError(f"cannot read the memory of {self.device(local_index)}; found: {self.probe().why}")
        import torch

        free, total = torch.get_device_module("sim").mem_get_info(local_index)
        return {"total": int(total), "used": int(total - free)}
