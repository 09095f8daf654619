"""What the doctor says of variables and files that were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll_core.spec.diagnostics import CheckContext, CheckResult
from roll_core.spec.platform import TorchBuild
from roll_platform_rocm import checks

HERE = CheckContext(platform=None)
VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "ROCM_HOME", "ROCM_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(checks, "torch_build", lambda: TorchBuild(version="2.13.0", hip="7.0.51831"))


def only(results: Iterator[CheckResult]) -> CheckResult:
    (result,) = results
    return result


@pytest.mark.parametrize(
    ("hip", "cuda", "rocr", "level"),
    [
        (None, None, None, "ok"),
        ("0,1", None, None, "ok"),
        (None, "0,1", None, "ok"),
        ("0", "0", "2", "ok"),
        ("0", "1", None, "error"),
        (None, None, "0", "error"),
        (None, "0", "0", "error"),
    ],
)
def test_variables_that_hide_devices_agree(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, cuda: str | None, rocr: str | None, level: str
) -> None:
    for name, value in zip(VARIABLES, (hip, cuda, rocr), strict=True):
        if value is not None:
            monkeypatch.setenv(name, value)
    found = only(checks.visible_devices(HERE))
    assert found.level == level
    assert ("unset" in found.remedy) is (level == "error")


def rocm(folder: Path, version: bytes) -> str:
    (folder / ".info").mkdir(exist_ok=True)
    (folder / ".info" / "version").write_bytes(version)
    return str(folder)


@pytest.mark.parametrize(
    ("version", "level"),
    [(b"7.0.2-56\n", "ok"), (b"7.1.0", "ok"), (b"6.4.1-83\n", "error"), (b"\xff?", "warning"), (b"", "warning")],
)
def test_rocm_of_the_host_is_held_against_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: bytes, level: str
) -> None:
    monkeypatch.setenv("ROCM_HOME", rocm(tmp_path, version))
    assert only(checks.toolkit(HERE)).level == level


def test_no_rocm_at_all_is_good_to_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "none"))
    assert only(checks.toolkit(HERE)).level == "note"


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(version=st.binary(max_size=60), hip=st.text(max_size=20))
def test_whatever_is_written_there_is_a_result(tmp_path: Path, version: bytes, hip: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "torch_build", lambda: TorchBuild(version="2.13.0", hip=hip))
        patch.setenv("ROCM_HOME", rocm(tmp_path, version))
        assert type(only(checks.toolkit(HERE))) is CheckResult
