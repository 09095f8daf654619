"""Reads AMD GPUs from the kernel: the topology and the memory counters in sysfs. Opens only text files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.spec.platform import visible_devices

if TYPE_CHECKING:
    from collections.abc import Iterable

HIP_VISIBLE = "HIP_VISIBLE_DEVICES"
CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
ROCR_VISIBLE = "ROCR_VISIBLE_DEVICES"
SYSFS = Path("/sys/class")
KFD = Path("/dev/kfd")
GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdDevice:
    """One GPU, as the kernel reports it."""

    gfx: tuple[int, int, int]
    """Version of the instruction set: (9, 4, 2) is gfx942."""
    unique_id: int
    total_bytes: int
    """0 if the kernel does not report it."""
    used_bytes: int
    """Memory in use by all processes; 0 if the kernel does not report it."""

    @property
    def name(self) -> str:
        """Name of the instruction set as compilers spell it, for example `gfx90a`."""
        return f"gfx{self.gfx[0]}{self.gfx[1]:x}{self.gfx[2]:x}"

    def __str__(self) -> str:
        return f"{self.name}, {self.total_bytes / GIB:.0f} GiB" if self.total_bytes else self.name


def installed_devices() -> tuple[AmdDevice, ...]:
    """GPUs that the kernel shows this process, in its order. A container cannot read those of others."""
    nodes = (SYSFS / "kfd" / "kfd" / "topology" / "nodes").glob("[0-9]*")
    properties = (_properties(node / "properties") for node in sorted(nodes, key=lambda node: int(node.name)))
    return tuple(_device(node) for node in properties if node.get("simd_count"))


def visible(devices: tuple[AmdDevice, ...]) -> tuple[AmdDevice, ...]:
    """Filter devices by the visibility variables.

    `ROCR_VISIBLE_DEVICES` applies first. Of the rest, `HIP_VISIBLE_DEVICES` selects; if it is not set, HIP reads
    `CUDA_VISIBLE_DEVICES`.
    """
    environ = os.environ
    left = _chosen(environ.get(ROCR_VISIBLE), devices)
    return _chosen(environ.get(HIP_VISIBLE, environ.get(CUDA_VISIBLE)), left)


def hiding_variables() -> str:
    """List the visibility variables that are set, for messages."""
    names = (ROCR_VISIBLE, HIP_VISIBLE, CUDA_VISIBLE)
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def _chosen(value: str | None, devices: tuple[AmdDevice, ...]) -> tuple[AmdDevice, ...]:
    chosen = []
    for entry in visible_devices(value, len(devices)):
        if entry.isdigit():
            chosen.append(devices[int(entry)])
        else:
            chosen += [device for device in devices if f"GPU-{device.unique_id:016x}" == entry]
    return tuple(chosen)


def _device(properties: dict[str, int]) -> AmdDevice:
    version = properties.get("gfx_target_version", 0)
    memory = SYSFS / "drm" / f"renderD{properties.get('drm_render_minor', 0)}" / "device"
    return AmdDevice(
        gfx=(version // 10_000, version // 100 % 100, version % 100),
        unique_id=properties.get("unique_id", 0),
        total_bytes=_number(memory / "mem_info_vram_total"),
        used_bytes=_number(memory / "mem_info_vram_used"),
    )


def _properties(file: Path) -> dict[str, int]:
    pairs: Iterable[list[str]] = (line.split() for line in _text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and _is_number(pair[1])}


def _number(file: Path) -> int:
    text = _text(file).strip()
    return int(text) if _is_number(text) else 0


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _text(file: Path) -> str:
    """Text of a file; empty if it cannot be read. The kernel hides other containers' devices in this way."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
