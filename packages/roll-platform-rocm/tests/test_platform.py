"""What the platform says of hosts that were recorded: files in the place of the kernel's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from roll_core.errors import UnsupportedError
from roll_core.spec.platform import TorchBuild
from roll_platform_rocm import kfd, platform
from roll_platform_rocm.platform import RocmPlatform
from roll_testing.errors import mentions, raises_error

GIB = 1024**3
MI300X, MI250X, MI50, RX6800 = 90402, 90010, 90006, 100300
ROCM_7 = TorchBuild(version="2.13.0+rocm7.0", hip="7.0.51831")
CPU_NODE = "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\ndrm_render_minor 0\n"
Host = Callable[..., None]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """`host(version, ..., build=)` makes this host one with these GPUs, behind two processors."""
    for name in (kfd.HIP_VISIBLE, kfd.CUDA_VISIBLE, kfd.ROCR_VISIBLE):
        monkeypatch.delenv(name, raising=False)

    def make(*versions: int, build: TorchBuild | None = ROCM_7) -> None:
        device = tmp_path / "kfd"
        device.touch()
        nodes = tmp_path / "class" / "kfd" / "kfd" / "topology" / "nodes"
        for number in (0, 1):
            write(nodes / str(number) / "properties", CPU_NODE)
        for index, version in enumerate(versions):
            minor = 128 + index
            properties = (
                f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {version}\n"
                f"drm_render_minor {minor}\nunique_id {0xAB00 + index}\n"
            )
            # Ten and more: nodes are numbered, not spelled.
            write(nodes / str(index + 2) / "properties", properties)
            memory = tmp_path / "class" / "drm" / f"renderD{minor}" / "device"
            write(memory / "mem_info_vram_total", f"{(100 + index) * GIB}\n")
            write(memory / "mem_info_vram_used", f"{index * GIB}\n")
        monkeypatch.setattr(kfd, "SYSFS", tmp_path / "class")
        monkeypatch.setattr(kfd, "KFD", device)
        monkeypatch.setattr(platform, "torch_build", lambda: build)

    return make


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def totals() -> list[int]:
    here = RocmPlatform()
    return [here.memory(index)["total"] // GIB for index in range(here.device_count())]


def test_a_node_of_eight_is_found_and_described(host: Host) -> None:
    host(*[MI300X] * 8)
    probe = RocmPlatform().probe()
    assert probe.found
    assert probe.why.startswith("1 × gfx942, 100 GiB, 1 × gfx942, 101 GiB")
    assert probe.why.endswith("torch 2.13.0+rocm7.0 (built for HIP 7.0.51831)")
    assert RocmPlatform().device_count() == 8
    assert RocmPlatform().device(3) == "cuda:3"


def test_more_than_eight_are_in_the_order_of_their_numbers(host: Host) -> None:
    host(*[MI300X] * 12)
    assert totals() == list(range(100, 112))


def test_a_host_without_the_driver_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kfd, "KFD", tmp_path / "kfd")
    probe = RocmPlatform().probe()
    assert not probe.found
    assert "amdgpu driver is not loaded" in probe.why
    assert RocmPlatform().device_count() == 0


def test_a_driver_without_a_gpu_says_so(host: Host) -> None:
    host()
    assert mentions(RocmPlatform().probe().why, "AMD")


def test_a_device_that_the_user_may_not_open_names_the_group(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(MI300X)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert RocmPlatform().probe().why.endswith("join the group render (or video)")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (None, "torch"),
        (TorchBuild(version="2.13.0+cu128", cuda="12.8"), "(built for CUDA 12.8)"),
    ],
)
def test_a_torch_that_cannot_use_the_devices_is_named(host: Host, build: TorchBuild | None, said: str) -> None:
    host(MI300X, build=build)
    assert not RocmPlatform().probe().found
    assert said in RocmPlatform().probe().why


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [102, 100]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [101]),
        ({"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "1"}, [103]),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, [101, 102]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, [102]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000ab03"}, [103]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_visible_devices_are_resolved_as_hip_does(
    host: Host, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: list[int]
) -> None:
    host(*[MI300X] * 4)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert totals() == expected


def test_hidden_devices_are_named_with_the_variables(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(MI300X)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert mentions(RocmPlatform().probe().why, "ROCR_VISIBLE_DEVICES=0", "HIP_VISIBLE_DEVICES=1", "1 AMD")


@pytest.mark.parametrize(("version", "name"), [(MI300X, "gfx942"), (MI250X, "gfx90a"), (MI50, "gfx906")])
def test_instruction_sets_are_written_as_compilers_do(host: Host, version: int, name: str) -> None:
    host(version)
    assert kfd.installed_devices()[0].name == name


@pytest.mark.parametrize(("version", "refused"), [(MI300X, False), (MI250X, False), (MI50, True), (RX6800, True)])
def test_bf16_is_refused_where_there_are_no_instructions_for_it(host: Host, version: int, refused: bool) -> None:
    host(version)
    assert ("use fp16 or fp32" in RocmPlatform().supports("bf16")) is refused
    assert RocmPlatform().supports("fp16") == ""


def test_memory_is_the_kernels_count(host: Host) -> None:
    host(MI300X, MI300X)
    assert RocmPlatform().memory(1) == {"total": 101 * GIB, "used": GIB}


def test_missing_memory_counter_is_an_error_and_not_zero(host: Host, tmp_path: Path) -> None:
    host(MI300X)
    (tmp_path / "class" / "drm" / "renderD128" / "device" / "mem_info_vram_total").unlink()
    assert RocmPlatform().probe().found
    with raises_error(UnsupportedError, "gfx942"):
        RocmPlatform().memory(0)


def test_garbage_in_kernel_files_is_no_device(host: Host, tmp_path: Path) -> None:
    host(MI300X)
    node = tmp_path / "class" / "kfd" / "kfd" / "topology" / "nodes" / "2" / "properties"
    node.write_bytes(b"\xff\xfe simd_count x\nsimd_count\n\n1 2 3\n")
    assert not RocmPlatform().probe().found


def test_workers_see_their_devices_under_both_names() -> None:
    platform = RocmPlatform()
    assert (platform.visible_devices, platform.also_visible_devices) == (
        "HIP_VISIBLE_DEVICES",
        ("CUDA_VISIBLE_DEVICES",),
    )


@pytest.mark.gpu
def test_the_kernel_and_torch_see_the_same_devices() -> None:
    if not RocmPlatform().probe().found:
        pytest.skip(RocmPlatform().probe().why)
    import torch

    seen = kfd.visible(kfd.installed_devices())
    assert len(seen) == torch.cuda.device_count()
    for index, device in enumerate(seen):
        properties = torch.cuda.get_device_properties(index)
        assert device.name == properties.gcnArchName.partition(":")[0]
        assert device.total_bytes == pytest.approx(properties.total_memory, rel=0.05)
