"""Platform `acme`: accelerators of Acme. Answers without importing torch, and opens no device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.errors import UnsupportedError
from roll_core.spec.platform import EnvVar, Platform, Probe, visible_devices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.platform import RoleKind

DEV = Path("/dev")
VISIBLE = "ACME_VISIBLE_DEVICES"
DTYPES = ("fp32", "bf16")
TIMEOUT = EnvVar(
    name="ACME_CONNECT_TIMEOUT",
    value="600",
    reason="ranks must connect within a minute by default, while other ranks may still load their model",
)


class AcmePlatform(Platform):
    """Devices with a device file, as far as the variable of visible devices shows them."""

    name = "acme"
    device_type = "acme"
    resource_name = "ACME"
    visible_devices = VISIBLE
    collective_backend = "acme"

    def probe(self) -> Probe:
        """Look for devices. `why` states what was seen, in both cases."""
        installed, num = num_installed(), self.device_count()
        if not installed:
            return Probe(found=False, why=f"no {DEV}/acme0: there is no device, or its driver is not loaded")
        if not num:
            return Probe(found=False, why=f"{VISIBLE}={os.environ.get(VISIBLE)} hides all {installed} devices")
        return Probe(found=True, why=f"{num} devices in {DEV}")

    def device_count(self) -> int:
        """Number of visible devices."""
        return len(visible_devices(os.environ.get(VISIBLE), num_installed()))

    def supports(self, dtype: str) -> str:
        """Empty if the devices support the dtype; otherwise the reason and alternatives."""
        return "" if dtype in DTYPES else f"{dtype} is not supported on acme: use {' or '.join(DTYPES)}"

    def environment(self, kind: RoleKind, local_indices: Sequence[int]) -> tuple[EnvVar, ...]:
        """Variables for workers that compute on a device."""
        return () if kind == "reward" else (TIMEOUT,)

    def memory(self, local_index: int) -> Mapping[str, int]:
        """Bytes `total` and `used` of the whole device. Raises `UnsupportedError` if there is no such device."""
        if local_index >= self.device_count():
            raise UnsupportedError(f"cannot read the memory of {self.device(local_index)}: {self.probe().why}")
        import torch

        free, total = torch.get_device_module(self.device_type).mem_get_info(local_index)
        return {"total": int(total), "used": int(total - free)}


def num_installed() -> int:
    """Number of device files."""
    return sum(device.name.removeprefix("acme").isdigit() for device in DEV.glob("acme*"))
