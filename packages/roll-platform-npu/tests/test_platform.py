"""What the platform says of hosts that were recorded: files in the place of the kernel's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from roll_core.errors import UnsupportedError
from roll_core.spec.platform import TorchBuild
from roll_platform_npu import devices, platform
from roll_platform_npu.platform import NpuPlatform
from roll_testing.errors import raises_error

GIB = 1024**3
Host = Callable[..., None]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """`host(number, chip=, torch=, torch_npu=)` makes this host one with so many NPUs."""
    monkeypatch.delenv(devices.VISIBLE, raising=False)

    def make(number: int, chip: str = "0xd802", torch: str = "2.13.0+cpu", torch_npu: str = "2.13.0.post1") -> None:
        dev, pci = tmp_path / "dev", tmp_path / "pci"
        for name in ("davinci_manager", "hisi_hdc", "null", *(f"davinci{index}" for index in range(number))):
            (dev / name).parent.mkdir(exist_ok=True)
            (dev / name).touch()
        for index, (vendor, device) in enumerate([("0x8086", "0x1234"), *[("0x19e5", chip)] * number]):
            folder = pci / f"0000:{index:02x}:00.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "device").write_text(f"{device}\n")
        monkeypatch.setattr(devices, "DEV", dev)
        monkeypatch.setattr(devices, "PCI", pci)
        monkeypatch.setattr(devices, "torch_npu_version", lambda: torch_npu)
        monkeypatch.setattr(platform, "torch_build", lambda: TorchBuild(version=torch) if torch else None)

    return make


def test_a_node_of_eight_is_found_and_described(host: Host) -> None:
    host(8)
    probe = NpuPlatform().probe()
    assert probe.found
    assert probe.why == "8 × Ascend 910B, torch 2.13.0+cpu, torch-npu 2.13.0.post1"
    assert NpuPlatform().device_count() == 8
    assert NpuPlatform().device(5) == "npu:5"


def test_a_host_without_the_driver_says_so(host: Host) -> None:
    host(0)
    probe = NpuPlatform().probe()
    assert not probe.found
    assert "no Ascend NPU, or its driver is not loaded" in probe.why
    assert NpuPlatform().device_count() == 0


@pytest.mark.parametrize(
    ("torch", "torch_npu", "said"),
    [
        ("", "2.13.0", "torch"),
        ("2.13.0", "", "'torch-npu==2.13.*'"),
        ("2.13.0", "2.14.0", "torch-npu 2.14.0"),
    ],
)
def test_software_that_is_missing_or_does_not_match_is_named(host: Host, torch: str, torch_npu: str, said: str) -> None:
    host(1, torch=torch, torch_npu=torch_npu)
    assert not NpuPlatform().probe().found
    assert said in NpuPlatform().probe().why


@pytest.mark.parametrize(("value", "number"), [("0,1", 2), ("3", 1), ("", 0), ("0,9,1", 1), ("1,1", 0)])
def test_visible_devices_count(host: Host, monkeypatch: pytest.MonkeyPatch, value: str, number: int) -> None:
    host(4)
    monkeypatch.setenv(devices.VISIBLE, value)
    assert NpuPlatform().device_count() == number
    assert (devices.VISIBLE in NpuPlatform().probe().why) is (number == 0)


@pytest.mark.parametrize(
    ("chip", "refused"), [("0xd801", True), ("0xd500", True), ("0xd802", False), ("0xffff", False)]
)
def test_bf16_is_refused_on_chips_without_it(host: Host, chip: str, refused: bool) -> None:
    host(2, chip=chip)
    assert ("use fp16 or fp32" in NpuPlatform().supports("bf16")) is refused


def test_memory_is_what_the_runtime_counts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(2)
    sizes = {0: (60 * GIB, 64 * GIB), 1: (1 * GIB, 64 * GIB)}
    npu = SimpleNamespace(mem_get_info=sizes.__getitem__)
    monkeypatch.setattr(torch, "get_device_module", {"npu": npu}.__getitem__)
    assert NpuPlatform().memory(1) == {"total": 64 * GIB, "used": 63 * GIB}
    with raises_error(UnsupportedError, "npu:2"):
        NpuPlatform().memory(2)


def test_roles_that_share_an_npu_do_not_take_the_same_ports() -> None:
    variables = {each.name: each.value for each in NpuPlatform().environment("generate", (0,))}
    assert variables["HCCL_HOST_SOCKET_PORT_RANGE"] == variables["HCCL_NPU_SOCKET_PORT_RANGE"] == "auto"
    assert NpuPlatform().environment("reward", ()) == ()


def test_trainers_get_expandable_segments_and_engines_do_not() -> None:
    def allocator(kind: str) -> str:
        return {each.name: each.value for each in NpuPlatform().environment(kind, (0,))}["PYTORCH_NPU_ALLOC_CONF"]

    assert (allocator("train"), allocator("generate")) == ("expandable_segments:True", "expandable_segments:False")


@pytest.mark.gpu
def test_the_kernel_and_torch_see_the_same_devices() -> None:
    if not NpuPlatform().probe().found:
        pytest.skip(NpuPlatform().probe().why)
    assert NpuPlatform().device_count() == torch.get_device_module("npu").device_count()
