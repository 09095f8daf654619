"""What the doctor says of recorded hosts: NVML's answers, programs that print a version, metadata."""

from __future__ import annotations

import importlib.metadata
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll_core.errors import install_command
from roll_core.spec.diagnostics import CheckContext, CheckResult
from roll_core.spec.platform import TorchBuild
from roll_platform_cuda import checks
from roll_testing.errors import mentions

Host = Callable[..., list[Any]]
HERE = CheckContext(platform=None)
NVCC = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {version}, V{version}.61\n"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    built_for("12.8", monkeypatch)


def built_for(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "torch_build", lambda: TorchBuild(version="2.13.0", cuda=cuda))


def only(results: Iterator[CheckResult]) -> CheckResult:
    (result,) = results
    return result


@pytest.mark.parametrize(
    ("driver", "torch", "level"),
    [
        (12080, "12.8", "ok"),
        (13000, "12.8", "ok"),
        (12040, "12.8", "warning"),
        (12080, "13.0", "error"),
        (11080, "12.8", "error"),
        (12040, "", "ok"),
        (12020, "", "warning"),
    ],
)
def test_older_driver_is_an_error_by_major_warning_by_minor(
    host: Host, monkeypatch: pytest.MonkeyPatch, driver: int, torch: str, level: str
) -> None:
    host("H100", cuda=driver)
    built_for(torch, monkeypatch)
    found = only(checks.driver(HERE))
    assert found.level == level
    assert ("newer driver" in found.remedy) is (level != "ok")


def test_torch_for_an_old_cuda_is_a_warning_with_a_good_driver(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host("H100", cuda=12080)
    built_for("11.8", monkeypatch)
    driver, torch = checks.driver(HERE)
    assert (driver.level, torch.level, torch.subject) == ("ok", "warning", "torch")
    assert "torch for CUDA 12.4 or newer" in torch.remedy


def test_without_a_driver_the_container_is_thought_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    found = only(checks.driver(HERE))
    assert found.level == "error"
    assert "--gpus all" in found.remedy
    assert list(checks.compute_capability(HERE)) == []


def toolkit(folder: Path, script: str) -> Path:
    """A toolkit whose nvcc is this shell script."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return folder


@pytest.mark.parametrize(
    ("version", "level"), [("12.8", "ok"), ("12.4", "warning"), ("11.8", "error"), ("13.0", "error")]
)
def test_other_toolkit_is_an_error_by_major_warning_by_minor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, level: str
) -> None:
    home = toolkit(tmp_path, f"cat <<'END'\n{NVCC.format(version=version)}END")
    monkeypatch.setenv("CUDA_HOME", str(home))
    found = only(checks.toolkit(HERE))
    assert found.level == level
    assert f"CUDA {version}" in found.found
    assert mentions(found.wanted, "CUDA 12.8")


@pytest.mark.parametrize("script", ["exit 1", "echo release the kraken", "kill -9 $$", "printf '\\377\\376'"])
def test_a_broken_nvcc_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path, script)))
    found = only(checks.toolkit(HERE))
    assert found.level == "warning"
    assert mentions(found.found, str(tmp_path))


def test_a_file_that_is_no_program_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = toolkit(tmp_path, "") / "bin" / "nvcc"
    nvcc.write_bytes(b"\x00\x01\x02")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert only(checks.toolkit(HERE)).level == "warning"


def test_a_home_without_a_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = only(checks.toolkit(HERE))
    assert (found.level, found.found) == ("warning", f"CUDA_HOME={tmp_path} has no bin/nvcc")


def test_no_toolkit_at_all_is_good_to_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert only(checks.toolkit(HERE)).level == "note"


CUDNN, NCCL = "nvidia-cudnn-cu12", "nvidia-nccl-cu12"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, CheckResult]]:
    """`installed(versions)`: what is said where torch wants cuDNN 9.10 and NCCL 2.27.3, and these are installed."""

    def look(**versions: str) -> dict[str, CheckResult]:
        names = {CUDNN: versions.get("cudnn"), NCCL: versions.get("nccl")}

        def version(name: str) -> str:
            if names.get(name) is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return names[name] or ""

        wanted = [
            "filelock",
            f"{CUDNN}==9.10.2.21; platform_system == 'Linux'",
            f"{NCCL}==2.27.3; platform_system == 'Linux'",
            "nvidia-nccl-cu11==2.20; platform_system == 'Plan 9'",
        ]
        monkeypatch.setattr(importlib.metadata, "requires", lambda _: wanted)
        monkeypatch.setattr(importlib.metadata, "version", version)
        return {each.subject: each for each in checks.libraries(HERE)}

    return look


def test_libraries_are_held_against_what_torch_wants(installed: Callable[..., dict[str, CheckResult]]) -> None:
    good = installed(cudnn="9.10.2.21", nccl="2.27.3")
    assert [good[name].level for name in ("cudnn", "nccl")] == ["ok", "ok"]
    other = installed(cudnn="8.9.7", nccl="2.26.2")
    assert [other[name].level for name in ("cudnn", "nccl")] == ["warning", "warning"]
    missing = installed(nccl="2.27.3")
    assert missing["cudnn"].level == "error"
    assert missing["cudnn"].remedy == install_command(f"{CUDNN}==9.10.2.21")


def test_a_torch_from_elsewhere_brings_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: None)
    assert [each.level for each in checks.libraries(HERE)] == ["note", "note"]


def test_capabilities_have_two_floors(host: Host) -> None:
    host("H100", "V100", "K80")
    levels = {each.subject: each.level for each in checks.compute_capability(HERE)}
    assert levels == {"cuda:0": "ok", "cuda:1": "warning", "cuda:2": "error"}


@pytest.mark.parametrize(
    ("value", "level"),
    [("9.0", "ok"), ("8.0;9.0a", "ok"), ("8.0+PTX", "ok"), ("8.0 8.6", "warning"), ("Hopper", "warning")],
)
def test_kernels_are_compiled_for_the_devices_that_are_here(
    host: Host, monkeypatch: pytest.MonkeyPatch, value: str, level: str
) -> None:
    host("H100", "H100")
    assert list(checks.arch_list(HERE)) == []
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", value)
    assert only(checks.arch_list(HERE)).level == level


@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("12.0", "ok"),
        ("12.0f", "ok"),
        ("9.0+PTX", "ok"),
        ("12.0a", "warning"),
        ("9.0a+PTX", "warning"),
        ("10.0f+PTX", "warning"),
        ("9.0", "warning"),
        ("12.2", "warning"),
    ],
)
def test_kernels_run_for_older_minor_versions_not_for_one_device(
    host: Host, monkeypatch: pytest.MonkeyPatch, value: str, level: str
) -> None:
    """The compatibility that NVIDIA's CUDA programming guide states, for a device of 12.1."""
    host("GB10")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", value)
    assert only(checks.arch_list(HERE)).level == level


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    said=st.binary(max_size=80) | st.from_regex(rb"release \d+\.\d+").map(bytes),
    home=TEXT | st.none(),
    archs=TEXT | st.from_regex(r"\d+\.\d(\+PTX)?", fullmatch=True),
    built=TEXT,
    driver=TEXT,
    cuda=st.integers(-1, 10**9),
    names=st.lists(st.sampled_from(["H100", "V100", "K80", "GB10"]), max_size=3),
)
def test_whatever_tools_and_drivers_say_is_a_result(
    host: Host, said: bytes, home: str | None, archs: str, built: str, driver: str, cuda: int, names: list[str]
) -> None:
    host(*names, driver=driver, cuda=cuda)
    with pytest.MonkeyPatch.context() as patch:
        built_for(built, patch)
        patch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=said, stderr=b""))
        patch.setattr(shutil, "which", lambda *_, **__: "/nvcc" if home else None)
        patch.setenv("TORCH_CUDA_ARCH_LIST", archs)
        if home is not None:
            patch.setenv("CUDA_HOME", home)
        for check in (checks.driver, checks.toolkit, checks.compute_capability, checks.arch_list):
            assert all(type(result) is CheckResult for result in check(HERE))
