"""What `PlatformConformance` does with a platform in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from roll_core.plugins.targets import load_target
from roll_core.spec.config import Dtype
from roll_core.spec.platform import ROLE_KINDS, Probe, RoleKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.spec.platform import Platform

KNOWN_DTYPES: tuple[str, ...] = get_args(Dtype)
UNKNOWN_DTYPE = "float3"
DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformReport:
    """What a platform said, and what happened meanwhile."""

    name: str
    device_type: str
    ray_resource: str
    visible_devices: str
    also_visible_devices: tuple[str, ...]
    collective_backend: str
    slots_share_cores: bool
    first: Probe
    second: Probe
    device_count: int
    devices: tuple[str, ...]
    environment: dict[str, tuple[list[Any], list[Any]]]
    """Name, value and reason of each variable, by kind of role, asked twice."""
    supports: dict[str, str]
    changes: tuple[str, ...]
    """Of this process, that the questions made."""
    opened: tuple[str, ...]
    """Device files that are open now and were not."""


def ask(_rank: int, target: str) -> PlatformReport:
    """Everything that a run asks before it starts, and more."""
    load_target(target, owner="the platform of the tests")  # what importing it does is for another test
    environment, folder, signals = dict(os.environ), Path.cwd(), _handlers()
    threads, opened = set(threading.enumerate()), _open_devices()
    platform: Platform = load_target(target, owner="the platform of the tests")()
    first, count = platform.probe(), platform.device_count()
    local_indices = tuple(range(count))[:1]
    said: dict[str, Any] = {
        "first": first,
        "device_count": count,
        "devices": tuple(platform.device(index) for index in range(max(count, 1))),
        "environment": {
            kind: (_told(platform, kind, local_indices), _told(platform, kind, local_indices)) for kind in ROLE_KINDS
        },
        "supports": {dtype: platform.supports(dtype) for dtype in (*KNOWN_DTYPES, UNKNOWN_DTYPE)},
        "second": platform.probe(),
    }
    same = {
        "the environment": os.environ == environment,
        "the working directory": Path.cwd() == folder,
        "signal handlers": _handlers() == signals,
        "the threads": set(threading.enumerate()) <= threads,
    }
    for name in ("name", "device_type", "ray_resource", "visible_devices", "also_visible_devices"):
        said[name] = getattr(platform, name)
    return PlatformReport(
        collective_backend=platform.collective_backend,
        slots_share_cores=platform.slots_share_cores,
        changes=tuple(what for what, kept in same.items() if not kept),
        opened=tuple(sorted(_open_devices() - opened)),
        **said,
    )


def compute(_rank: int, target: str, dtypes: Sequence[str]) -> dict[str, float]:
    """Ones times ones, summed over 8 on the first slot, by dtype."""
    import torch

    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    device = load_target(target, owner="the platform of the tests")().device(0)
    ones = {dtype: torch.ones(8, 8, device=device, dtype=names[dtype]) for dtype in dtypes}
    return {dtype: float((matrix @ matrix)[3, 5]) for dtype, matrix in ones.items()}


def fill(_rank: int, target: str, num_bytes: int) -> tuple[dict[str, int], dict[str, int]]:
    """Memory of the first slot before and after so many bytes were put there, once the device is in use."""
    import torch

    platform: Platform = load_target(target, owner="the platform of the tests")()
    in_use = [torch.ones(1, device=platform.device(0))]
    before = dict(platform.memory(0))
    in_use.append(torch.ones(num_bytes // 4, device=platform.device(0)))
    float(in_use[-1].sum() if num_bytes else 0)  # it is there once it was read
    return before, dict(platform.memory(0))


def _told(platform: Platform, kind: RoleKind, local_indices: Sequence[int]) -> list[Any]:
    """For a reward's workers there is no slot."""
    variables = platform.environment(kind, () if kind == "reward" else local_indices)
    return [(each.name, each.value, each.reason) for each in variables]


def _handlers() -> dict[signal.Signals, Any]:
    return {each: signal.getsignal(each) for each in signal.Signals}


def _open_devices() -> set[str]:
    """Device files that this process holds open; none where the system does not say."""
    found = set()
    for entry in DESCRIPTORS.iterdir() if DESCRIPTORS.is_dir() else ():
        try:
            found.add(os.readlink(entry))
        except OSError:  # the one that listed the folder
            continue
    return {path for path in found if path.startswith("/dev/")}
