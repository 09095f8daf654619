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
    """The `npu` platform: Ascend NPUs."""
    yield PlatformProvider(
        name="npu",
        target="roll_platform_npu.platform:NpuPlatform",
        summary="Ascend NPUs",
        needs=("torch-npu>=2.11",),
        priority=10,
    )


@hookimpl
def roll_checks() -> Iterator[CheckProvider]:
    """Check of the CANN environment."""
    yield CheckProvider(
        name="cann",
        target="roll_platform_npu.checks:cann",
        summary="CANN's environment is set",
        platform="npu",
    )
