"""Hooks that provide this package's parts. Imports neither torch nor NVML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import CheckProvider, PlatformProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_platforms() -> Iterator[PlatformProvider]:
    """The `cuda` platform: NVIDIA GPUs."""
    yield PlatformProvider(
        name="cuda",
        target="roll_platform_cuda.platform:CudaPlatform",
        summary="NVIDIA GPUs",
        needs=("nvidia-ml-py>=12.560",),
        priority=10,
    )


@hookimpl
def roll_checks() -> Iterator[CheckProvider]:
    """Checks of the driver, the CUDA toolkit, libraries and devices."""
    for name, function, summary in (
        ("cuda_driver", "driver", "The driver supports the CUDA version of torch"),
        ("cuda_toolkit", "toolkit", "CUDA_HOME and nvcc match the CUDA version of torch"),
        ("cuda_libraries", "libraries", "cuDNN and NCCL match the requirements of torch"),
        ("compute_capability", "compute_capability", "Devices are Pascal or newer, Ampere or newer for bf16"),
        ("cuda_arch_list", "arch_list", "TORCH_CUDA_ARCH_LIST covers the devices"),
    ):
        target = f"roll_platform_cuda.checks:{function}"
        yield CheckProvider(name=name, target=target, summary=summary, platform="cuda")
