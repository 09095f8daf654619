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
        summary="GPUs of NVIDIA",
        needs=("nvidia-ml-py>=12.560",),
        priority=10,
    )


@hookimpl
def roll_checks() -> Iterator[CheckProvider]:
    """Checks of the driver, the CUDA toolkit, libraries and devices."""
    for name, function, summary in (
        ("cuda_driver", "driver", "Whether the driver runs the CUDA of torch"),
        ("cuda_toolkit", "toolkit", "CUDA_HOME and nvcc against torch's CUDA"),
        ("cuda_libraries", "libraries", "cuDNN and NCCL against what torch wants"),
        ("compute_capability", "compute_capability", "Pascal at least, Ampere for bf16"),
        ("cuda_arch_list", "arch_list", "TORCH_CUDA_ARCH_LIST against the devices"),
    ):
        target = f"roll_platform_cuda.checks:{function}"
        yield CheckProvider(name=name, target=target, summary=summary, platform="cuda")
