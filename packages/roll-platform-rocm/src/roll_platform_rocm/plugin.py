"""Hooks that provide this package's parts. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import CheckProvider, PlatformProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_platforms() -> Iterator[PlatformProvider]:
    """The `rocm` platform: AMD GPUs."""
    yield PlatformProvider(
        name="rocm", target="roll_platform_rocm.platform:RocmPlatform", summary="AMD GPUs", priority=10
    )


@hookimpl
def roll_checks() -> Iterator[CheckProvider]:
    """Checks of the visibility variables and the ROCm toolkit."""
    for name, function, summary in (
        ("rocm_visible_devices", "visible_devices", "The variables that select devices are consistent"),
        ("rocm_toolkit", "toolkit", "ROCm on the host matches that of torch"),
    ):
        target = f"roll_platform_rocm.checks:{function}"
        yield CheckProvider(name=name, target=target, summary=summary, platform="rocm")
