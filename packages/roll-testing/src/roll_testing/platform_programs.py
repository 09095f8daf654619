"""Functions that `PlatformConformance` runs with a platform in a separate process."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from roll_core.errors import UnsupportedError
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
    """What a platform reported, and the side effects of querying it."""

    name: str
    device_type: str
    resource_name: str
    visible_devices: str
    also_visible_devices: tuple[str, ...]
    collective_backend: str
    slots_share_cores: bool
    first: Probe
    second: Probe
    device_count: int
    devices: tuple[str, ...]
    environment: dict[str, tuple[list[Any], list[Any]]]
    """Results of two queries by kind of role; each lists (name, value, reason) of the variables."""
    supports: dict[str, str]
    changes: tuple[str, ...]
    """Parts of the process state that the queries changed."""
    opened: tuple[str, ...]
    """Device files that the queries opened and left open."""


def ask(_rank: int, target: str) -> PlatformReport:
    """Query everything that a run queries before it starts, and more."""
    load_target(target, owner="the platform of the tests")  # another test covers side effects of the import
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
    for name in ("name", "device_type", "resource_name", "visible_devices", "also_visible_devices"):
        said[name] = getattr(platform, name)
    return PlatformReport(
        collective_backend=platform.collective_backend,
        slots_share_cores=platform.slots_share_cores,
        changes=tuple(what for what, unchanged in same.items() if not unchanged),
        opened=tuple(sorted(_open_devices() - opened)),
        **said,
    )


def compute(_rank: int, target: str, dtypes: Sequence[str]) -> dict[str, float]:
    """Multiply two 8×8 matrices of ones on the first slot. Return one entry of the product by dtype; 8 is correct."""
    import torch

    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    device = load_target(target, owner="the platform of the tests")().device(0)
    ones = {dtype: torch.ones(8, 8, device=device, dtype=names[dtype]) for dtype in dtypes}
    return {dtype: float((matrix @ matrix)[3, 5]) for dtype, matrix in ones.items()}


def fill(_rank: int, target: str, num_bytes: int) -> tuple[dict[str, int], dict[str, int]] | str:
    """Return the memory of the first slot before and after allocating `num_bytes`, once the device is in use.

    Or the reason why the platform cannot measure it.
    """
    import torch

    platform: Platform = load_target(target, owner="the platform of the tests")()
    in_use = [torch.ones(1, device=platform.device(0))]
    try:
        before = dict(platform.memory(0))
    except UnsupportedError as error:
        return str(error)
    in_use.append(torch.ones(num_bytes // 4, device=platform.device(0)))
    float(in_use[-1].sum() if num_bytes else 0)  # reading forces the allocation
    return before, dict(platform.memory(0))


def _told(platform: Platform, kind: RoleKind, local_indices: Sequence[int]) -> list[Any]:
    """Query a role's variables. Reward workers have no slot."""
    variables = platform.environment(kind, () if kind == "reward" else local_indices)
    return [(variable.name, variable.value, variable.reason) for variable in variables]


def _handlers() -> dict[signal.Signals, Any]:
    return {number: signal.getsignal(number) for number in signal.Signals}


def _open_devices() -> set[str]:
    """Return the device files that this process has open; empty if the system does not list them."""
    paths = set()
    for entry in DESCRIPTORS.iterdir() if DESCRIPTORS.is_dir() else ():
        try:
            paths.add(os.readlink(entry))
        except OSError:  # descriptor of the listing itself
            continue
    return {path for path in paths if path.startswith("/dev/")}
