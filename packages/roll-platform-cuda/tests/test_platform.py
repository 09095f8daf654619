"""What the platform says of hosts that were recorded: NVML's answers stand in for the hardware."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from roll_core.errors import UnsupportedError
from roll_core.spec.platform import TorchBuild
from roll_platform_cuda.nvml import survey
from roll_platform_cuda.platform import CudaPlatform
from roll_testing.errors import mentions, raises_error

GIB = 1024**3
Host = Callable[..., list[Any]]


def variables(kind: str) -> dict[str, str]:
    return {each.name: each.value for each in CudaPlatform().environment(kind, (0,))}


def test_a_node_of_eight_is_found_and_described(host: Host) -> None:
    host(*["H100"] * 8)
    probe = CudaPlatform().probe()
    assert probe.found
    assert probe.why == (
        "8 × NVIDIA H100 80GB HBM3 (compute capability 9.0, 80 GiB), driver 570.86.15,"
        " torch 2.13.0+cu128 (built for CUDA 12.8)"
    )
    assert CudaPlatform().device_count() == 8
    assert CudaPlatform().device(7) == "cuda:7"


def test_a_host_without_a_driver_says_what_nvml_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    probe = CudaPlatform().probe()
    assert not probe.found
    assert mentions(probe.why, "NVIDIA", "(NVML Shared Library Not Found)")
    assert CudaPlatform().device_count() == 0


def test_driver_library_mismatch_is_the_probes_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch() -> None:
        raise pynvml.NVMLError_LibRmVersionMismatch

    monkeypatch.setattr(pynvml, "nvmlInit", mismatch)
    assert "version mismatch" in CudaPlatform().probe().why


def test_a_device_that_fell_off_the_bus_is_no_traceback(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host("H100")

    def lost(_: object) -> None:
        raise pynvml.NVMLError_GpuIsLost

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lost)
    assert mentions(CudaPlatform().probe().why, "(GPU is lost)")


def test_nvml_is_left_as_often_as_it_is_entered(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host("H100")
    calls: list[str] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: calls.append("in"))
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: calls.append("out"))

    def fail() -> None:
        raise pynvml.NVMLError_Unknown

    CudaPlatform().probe()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", fail)
    CudaPlatform().probe()
    assert calls == ["in", "out"] * 2


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (None, "torch"),
        (TorchBuild(version="2.13.0+cpu"), "CUDA 12.8"),
        (TorchBuild(version="2.13.0", hip="7.0"), "HIP 7.0"),
    ],
)
def test_a_torch_that_cannot_use_the_devices_is_named(host: Host, build: TorchBuild | None, said: str) -> None:
    host("A100", build=build)
    probe = CudaPlatform().probe()
    assert not probe.found
    assert mentions(probe.why, "NVIDIA A100", said)
    assert CudaPlatform().device_count() == 0


@pytest.mark.parametrize(
    ("value", "gibibytes"),
    [("1", [40]), ("2,0", [16, 80]), ("0,7,1", [80]), ("GPU-bb", [40]), ("GPU-cc,GPU-aa", [16, 80]), ("GPU-", [])],
)
def test_visible_devices_are_resolved_as_cuda_does(
    host: Host, monkeypatch: pytest.MonkeyPatch, value: str, gibibytes: list[int]
) -> None:
    host("H100", "A100", "V100", uuids=("GPU-aa11", "GPU-bb22", "GPU-cc33"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    platform = CudaPlatform()
    assert platform.device_count() == len(gibibytes)
    assert [platform.memory(index)["total"] // GIB for index in range(len(gibibytes))] == gibibytes


def test_hidden_devices_are_named_with_the_variable(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host("H100", "H100")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert mentions(CudaPlatform().probe().why, "CUDA_VISIBLE_DEVICES=", "2 NVIDIA")


def test_a_part_of_a_device_has_the_capability_of_the_whole(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = host("H100")
    part = SimpleNamespace(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", total=10 * GIB, used=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", {"MIG-1": part}.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", lambda _: whole)

    def capability(gpu: Any) -> list[int]:
        if gpu is part:
            raise pynvml.NVMLError_NotSupported
        return list(gpu.capability)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", capability)
    assert CudaPlatform().memory(0)["total"] == 10 * GIB
    assert CudaPlatform().supports("bf16") == ""


def test_bf16_below_ampere_is_refused_with_the_way_out(host: Host) -> None:
    host("V100")
    assert CudaPlatform().supports("bf16") == (
        "bf16 needs compute capability 8.0, but Tesla V100-SXM2-16GB has 7.0: use fp32 or fp16"
    )
    assert CudaPlatform().supports("fp16") == ""


def test_fp8_needs_ada_and_is_no_dtype_of_models(host: Host) -> None:
    host("A100", "H100")
    assert CudaPlatform().supports("fp8").startswith("fp8 needs compute capability 8.9, but ")
    assert "has 8.0: use fp32 or fp16 or bf16" in CudaPlatform().supports("fp8")
    assert "use fp32, fp16, bf16" in CudaPlatform().supports("int4")
    host("H100")
    assert CudaPlatform().supports("fp8") == ""


def test_old_device_among_new_ones_counts(host: Host) -> None:
    host("A100", "V100")
    assert "V100" in CudaPlatform().supports("bf16")


def test_ampere_and_newer_compute_in_every_dtype(host: Host) -> None:
    host("A100", "H100")
    assert [CudaPlatform().supports(dtype) for dtype in ("fp32", "fp16", "bf16")] == ["", "", ""]


def test_a_device_older_than_pascal_is_refused_altogether(host: Host) -> None:
    host("K80")
    assert CudaPlatform().supports("fp32").endswith("Tesla K80 has 3.7: this device is too old")


def test_memory_is_the_drivers_count(host: Host) -> None:
    host("A100", "H100")
    assert CudaPlatform().memory(1) == {"total": 80 * GIB, "used": GIB}


def test_missing_memory_counter_is_an_error_and_not_zero(host: Host) -> None:
    host("GB10")
    assert CudaPlatform().probe().found
    with raises_error(UnsupportedError, "NVIDIA", "GB10"):
        CudaPlatform().memory(0)


def test_memory_of_a_device_that_is_not_here_names_what_is(host: Host) -> None:
    host("A100")
    with raises_error(UnsupportedError, "cuda:3", "1", "NVIDIA", "A100"):
        CudaPlatform().memory(3)


def test_trainers_get_expandable_segments_and_engines_do_not() -> None:
    assert variables("train")["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert variables("score")["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert variables("generate")["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"


def test_users_allocator_options_keep_their_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch ignores this name if PYTORCH_CUDA_ALLOC_CONF is set."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in variables("train").keys() | variables("score").keys()
    assert variables("generate")["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"


def test_both_ends_of_a_group_agree_on_what_nccl_needs_them_to() -> None:
    names = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "CUDA_DEVICE_ORDER")
    assert [variables("train")[name] for name in names] == ["0", "0", "PCI_BUS_ID"]
    assert [variables("generate")[name] for name in names] == ["0", "0", "PCI_BUS_ID"]


def test_a_reward_gets_nothing() -> None:
    assert variables("reward") == {}


@pytest.mark.gpu
def test_the_driver_and_torch_see_the_same_devices() -> None:
    if not CudaPlatform().probe().found:
        pytest.skip(CudaPlatform().probe().why)
    import torch

    seen = survey().devices
    assert len(seen) == torch.cuda.device_count()
    for index, device in enumerate(seen):
        properties = torch.cuda.get_device_properties(index)
        assert device.name == properties.name
        assert device.capability == (properties.major, properties.minor)
        assert device.total_bytes == pytest.approx(properties.total_memory, rel=0.05)
