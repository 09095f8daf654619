"""What this package offers. Imports neither torch nor NVML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import PlatformProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_platforms() -> Iterator[PlatformProvider]:
    """GPUs of NVIDIA."""
    yield PlatformProvider(
        name="cuda",
        target="roll_platform_cuda.platform:CudaPlatform",
        summary="GPUs of NVIDIA",
        needs=("nvidia-ml-py>=12.560",),
        priority=10,
    )
