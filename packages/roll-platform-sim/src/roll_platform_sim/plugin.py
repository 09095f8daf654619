"""Hooks that provide this package's parts. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import PlatformProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_platforms() -> Iterator[PlatformProvider]:
    """The `sim` platform: simulated devices. Every other platform that is found is preferred."""
    yield PlatformProvider(
        name="sim",
        target="roll_platform_sim.platform:SimPlatform",
        summary="simulated devices in the host's memory, for tests",
        priority=-1,
    )
