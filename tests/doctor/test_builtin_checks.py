"""The checks of the core, on machines that were made up at their boundary: what the system answers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll_core.builtin.cpu import CpuPlatform
from roll_core.errors import install_command
from roll_core.pipelines.config import SFTConfig
from roll_core.spec.diagnostics import CheckContext, CheckResult
from roll_core.spec.platform import TorchBuild
from roll_tools.checks import devices, files, host, software

GIB = 1024**3


class Gpus(CpuPlatform):
    """Two devices of 80 GiB, of which the second is in use; no bf16."""

    name = "gpus"
    slots_share_cores = False

    def device_count(self) -> int:
        return 2

    def device(self, local_index: int) -> str:
        return f"gpu:{local_index}"

    def supports(self, dtype: str) -> str:
        return "bf16 needs another device: use fp16" if dtype == "bf16" else ""

    def memory(self, local_index: int) -> dict[str, int]:
        return {"total": 80 * GIB, "used": 40 * GIB * local_index}


def only(results: Iterator[CheckResult]) -> CheckResult:
    (result,) = results
    return result


def by_subject(results: Iterator[CheckResult]) -> dict[str, CheckResult]:
    return {each.subject: each for each in results}


def sft(folder: Path, **keys: Any) -> CheckContext:
    """A run whose paths are below the folder."""
    rows = folder / "rows.jsonl"
    if not rows.exists():
        rows.write_text('{"prompt": "a", "response": "b"}\n')
    role = {"data_args": {"file_name": str(rows)}, "strategy_args": {"strategy_name": "hf_train"}}
    given_keys = {"pipeline": "sft", "output_dir": str(folder / "output"), "sft_train": role, **keys}
    return CheckContext(platform=CpuPlatform(), config=SFTConfig.model_validate(given_keys))


# -- host --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "release", "level", "said"),
    [
        ("Linux", "6.8.0-45-generic", "ok", "Linux 6.8.0-45-generic"),
        ("Linux", "5.15.153.1-microsoft-standard-WSL2", "ok", "in WSL 2"),
        ("Linux", "4.4.0-19041-Microsoft", "error", "in WSL 1"),
        ("Linux", "5.4.0-150-generic", "warning", "5.4.0"),
        ("Linux", "rolling", "warning", "rolling"),
        ("Darwin", "24.1.0", "warning", "Darwin"),
        ("Windows", "11", "error", "Windows 11"),
    ],
)
def test_the_system_and_its_kernel(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch, system: str, release: str, level: str, said: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    found = only(host.operating_system(context))
    assert found.level == level
    assert said in found.found
    assert (re.search("wsl", found.remedy, re.IGNORECASE) is not None) is (level == "error")


@pytest.mark.parametrize(("free", "level"), [(64 * 1024**2, "warning"), (GIB, "ok")])
def test_shared_memory_of_a_container(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, level: str
) -> None:
    monkeypatch.setattr(host, "SHM", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    found = only(host.shared_memory(context))
    assert found.level == level
    assert ("--shm-size" in found.remedy) is (level == "warning")


def test_a_system_without_shared_memory(context: CheckContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "SHM", tmp_path / "none")
    assert only(host.shared_memory(context)).level == "note"


@pytest.mark.parametrize(
    ("soft", "hard", "level", "remedy"),
    [
        (1024, 1_048_576, "warning", "ulimit -n 8192"),
        (1024, 4096, "warning", "limits.conf: at most 4096"),
        (65536, 65536, "ok", ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", ""),
    ],
)
def test_the_limit_of_open_files(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, level: str, remedy: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    found = only(host.open_files(context))
    assert found.level == level
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("variables", "load", "level"),
    [
        ({}, 0.5, "ok"),
        ({}, 5.0, "note"),
        ({"OMP_NUM_THREADS": "4"}, 0.5, "ok"),
        ({"OMP_NUM_THREADS": "5"}, 0.5, "warning"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 0.5, "warning"),
    ],
)
def test_threads_and_other_programs(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], load: float, level: str
) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(host, "usable_cores", lambda: 4)
    assert only(host.threads(context)).level == level


@pytest.mark.parametrize(("free", "level"), [(GIB // 2, "error"), (10 * GIB, "warning"), (60 * GIB, "ok")])
def test_space_where_runs_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, level: str) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (asked.append(path), SimpleNamespace(free=free))[1])
    assert only(host.disk(sft(tmp_path))).level == level
    assert asked == [tmp_path]  # the nearest folder that is there


@pytest.mark.parametrize(
    ("version", "cuda", "level"),
    [("0.29.2+cu132", "", "error"), ("0.29.2+cu132", "12.8", "error"), ("0.29.2+cu132", "13.0", ""), ("0.29", "", "")],
)
def test_a_torchvision_for_another_torch_is_an_error(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, cuda: str, level: str
) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    (package / "version.py").write_text(f"__version__ = '{version}'\ngit_version = ''\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(software, "torch_build", lambda: TorchBuild(version="2.13.0", cuda=cuda))
    found = by_subject(software.libraries(context)).get("torchvision")
    assert (found.level if found else "") == level


# -- software ----------------------------------------------------------------------------------------------------------


def test_a_python_that_is_too_old(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    found = only(software.python(context))
    assert found.level == "error"
    assert "uv venv --python 3.11" in found.remedy


def test_libraries_of_this_environment_are_ok(context: CheckContext) -> None:
    found = by_subject(software.libraries(context))
    assert {each.level for each in found.values()} == {"ok"}
    assert set(found) == set(software.SHOWN)
    assert "built for" in found["torch"].found


def test_a_library_that_is_missing_or_too_old_names_the_command(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "hydra-core":
            return "1.0.0"
        raise importlib.metadata.PackageNotFoundError(name)

    wanted = ["hydra-core>=1.3.2", "torch>=2.6", "extra-one; extra == 'tests'", "old-one; python_version < '3'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: wanted)
    monkeypatch.setattr(importlib.metadata, "version", version)
    found = by_subject(software.libraries(context))
    assert set(found) == {"hydra-core", "torch"}
    older = found["hydra-core"]
    assert (older.level, older.found, older.wanted) == ("error", "1.0.0", ">=1.3.2")
    assert found["torch"].remedy == install_command("torch>=2.6")


# -- devices -----------------------------------------------------------------------------------------------------------


def test_a_dtype_that_a_role_wants_and_devices_lack_is_an_error(tmp_path: Path) -> None:
    run = sft(tmp_path)
    role = run.config.sft_train  # type: ignore[union-attr]
    bf16 = role.model_copy(update={"model_args": role.model_args.model_copy(update={"dtype": "bf16"})})
    wants = CheckContext(platform=Gpus(), config=run.config.model_copy(update={"sft_train": bf16}))  # type: ignore[union-attr]
    found = by_subject(devices.dtypes(wants))
    assert found["bf16"].level == "error"
    assert "sft_train" in found["bf16"].remedy
    assert by_subject(devices.dtypes(CheckContext(platform=Gpus())))["bf16"].level == "note"


def test_a_device_that_others_use_is_a_warning() -> None:
    found = by_subject(devices.device_memory(CheckContext(platform=Gpus())))
    assert (found["gpu:0"].level, found["gpu:1"].level) == ("ok", "warning")
    assert "80.0 GiB, of which 40.0 are in use" in found["gpu:1"].found


def test_a_small_device_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpus, "memory", lambda *_: {"total": 8 * GIB, "used": 0})
    assert {each.level for each in devices.device_memory(CheckContext(platform=Gpus()))} == {"warning"}


def test_without_a_platform_devices_are_not_reported() -> None:
    assert not [*devices.dtypes(CheckContext(platform=None)), *devices.device_memory(CheckContext(platform=None))]


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("a file is in the way")
    found = only(files.output(sft(tmp_path)))
    assert found.level == "error"
    assert "output_dir" in found.remedy


def test_looking_whether_output_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    run = sft(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert only(files.output(run)).level == "ok"
    assert sorted(tmp_path.iterdir()) == before


def model(folder: Path, source: str) -> CheckContext:
    return sft(folder, pretrain=source)


def test_models_in_folders(tmp_path: Path) -> None:
    good, empty = tmp_path / "good", tmp_path / "empty"
    good.mkdir()
    empty.mkdir()
    (good / "config.json").write_text("{}")
    assert only(files.models(model(tmp_path, str(good)))).level == "ok"
    assert "no config.json" in only(files.models(model(tmp_path, str(empty)))).found
    missing = only(files.models(model(tmp_path, str(tmp_path / "none"))))
    assert missing.level == "error"
    assert missing.subject == "sft_train"


def test_models_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in files.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    source = "no-such-organisation/no-such-model"
    assert only(files.models(model(tmp_path, source))).level == "note"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = only(files.models(model(tmp_path, source)))
    assert offline.level == "error"
    assert "hf download" in offline.remedy
    assert only(files.models(model(tmp_path, "not a/name!"))).level == "error"


def test_rows_that_are_missing_or_empty(tmp_path: Path) -> None:
    run = sft(tmp_path)
    assert only(files.data(run)).level == "ok"
    (tmp_path / "rows.jsonl").write_text("")
    assert "is empty" in only(files.data(run)).found
    (tmp_path / "rows.jsonl").unlink()
    missing = only(files.data(run))
    assert (missing.level, missing.subject) == ("error", "sft_train.data_args")
    assert "No such file" in missing.found


def test_without_a_config_there_is_nothing_to_look_for(context: CheckContext) -> None:
    assert not [*files.output(context), *files.models(context), *files.data(context)]


# -- garbage -----------------------------------------------------------------------------------------------------------

CHECKS: tuple[Callable[[CheckContext], Iterator[CheckResult]], ...] = (
    host.operating_system,
    host.shared_memory,
    host.open_files,
    software.python,
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    system=st.sampled_from(["Linux", "Windows", "Darwin", ""]) | st.text(),
    release=st.text() | st.from_regex(r"\d+\.\d+.*"),
    limits=st.tuples(st.integers(-1, 2**63), st.integers(-1, 2**63)),
    free=st.integers(0, 2**70),
)
def test_any_system_reply_is_a_result(
    context: CheckContext, system: str, release: str, limits: tuple[int, int], free: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "system", lambda: system)
        patch.setattr(platform, "release", lambda: release)
        patch.setattr(resource, "getrlimit", lambda _: limits)
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        for check in CHECKS:
            assert all(type(result) is CheckResult for result in check(context))
