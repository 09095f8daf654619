"""Hosts as NVML describes them, with nothing faked above its functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pynvml
import pytest

from roll_core.spec.platform import TorchBuild
from roll_platform_cuda import platform

GIB = 1024**3


@dataclass(frozen=True)
class Gpu:
    """What NVML answers for one device."""

    name: str
    capability: tuple[int, int]
    total: int
    used: int = 0
    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"


GPUS = {
    "H100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, 1 * GIB),
    "A100": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 40 * GIB),
    "V100": Gpu("Tesla V100-SXM2-16GB", (7, 0), 16 * GIB),
    "K80": Gpu("Tesla K80", (3, 7), 12 * GIB),
    "GB10": Gpu("NVIDIA GB10", (12, 1), 0),
}
CUDA_12_8 = TorchBuild(version="2.13.0+cu128", cuda="12.8")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Gpu]]:
    """`host("H100", ..., driver=, cuda=, build=, uuids=)` makes this host one with these devices, and returns them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(
        *names: str,
        driver: str = "570.86.15",
        cuda: int = 12080,
        build: TorchBuild | None = CUDA_12_8,
        uuids: Sequence[str] = (),
    ) -> list[Gpu]:
        gpus = [GPUS[name] for name in names]
        gpus = [replace(gpu, uuid=uuid) for gpu, uuid in zip(gpus, uuids, strict=True)] if uuids else gpus
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: driver,
            "nvmlSystemGetCudaDriverVersion": lambda: cuda,
            "nvmlDeviceGetCount": lambda: len(gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: gpus[index],
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetName": lambda gpu: gpu.name,
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: list(gpu.capability),
            "nvmlDeviceGetMemoryInfo": _memory,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)
        monkeypatch.setattr(platform, "torch_build", lambda: build)
        return gpus

    return make


def _memory(gpu: Gpu) -> SimpleNamespace:
    if not gpu.total:
        raise pynvml.NVMLError_NotSupported
    return SimpleNamespace(total=gpu.total, used=gpu.used, free=gpu.total - gpu.used)
