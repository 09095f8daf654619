"""Finds Ascend NPUs through the kernel: device files, and the PCI ids of the chips."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

from roll_core.spec.platform import visible_devices

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
DEV = Path("/dev")
PCI = Path("/sys/bus/pci/devices")
HUAWEI = "0x19e5"
CHIPS = {
    "0xd100": "Ascend 310",
    "0xd500": "Ascend 310P",
    "0xd801": "Ascend 910",
    "0xd802": "Ascend 910B",
    "0xd803": "Ascend 910C",
}
"""Names of chips by PCI device id; incomplete."""


def num_installed() -> int:
    """Number of device files `/dev/davinci<number>`; a container has only those that were passed to it."""
    try:
        names = [path.name for path in DEV.iterdir()]
    except OSError:
        return 0
    return sum(re.fullmatch(r"davinci\d+", name) is not None for name in names)


def num_visible() -> int:
    """Number of installed devices that `ASCEND_RT_VISIBLE_DEVICES` makes visible."""
    return len(visible_devices(os.environ.get(VISIBLE), num_installed()))


def chips() -> tuple[str, ...]:
    """Names of this host's chips, without duplicates; omits chips that PCI does not show or `CHIPS` does not list."""
    try:
        folders = sorted(PCI.iterdir())
    except OSError:
        return ()
    names = [CHIPS.get(_id(folder / "device"), "") for folder in folders if _id(folder / "vendor") == HUAWEI]
    return tuple(dict.fromkeys(name for name in names if name))


def torch_npu_version() -> str:
    """Version of the installed torch-npu; empty if there is none."""
    try:
        return importlib.metadata.version("torch-npu")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _id(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
