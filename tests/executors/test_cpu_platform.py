import os
from pathlib import Path

import psutil
import pytest

from roll_core.builtin.cpu import CpuPlatform
from roll_core.runtime import host


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hierarchy in the place of this host's."""
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    return tmp_path


@pytest.fixture
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.usefixtures("_eight_cores", "cgroups")
def test_cores_are_those_of_the_affinity() -> None:
    assert host.usable_cores() == 8


@pytest.mark.usefixtures("_eight_cores")
@pytest.mark.parametrize(("quota", "cores"), [("250000 100000", 3), ("max 100000", 8), ("50000 100000", 1)])
def test_quota_of_a_cgroup_limits_cores(cgroups: Path, quota: str, cores: int) -> None:
    (cgroups / "cpu.max").write_text(quota)
    assert host.usable_cores() == cores


@pytest.mark.usefixtures("_eight_cores")
def test_quota_of_a_version_1_cgroup_limits_cores(cgroups: Path) -> None:
    (cgroups / "cpu").mkdir()
    (cgroups / "cpu" / "cpu.cfs_quota_us").write_text("400000")
    (cgroups / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert host.usable_cores() == 4


def test_memory_is_what_the_cgroup_allows(cgroups: Path) -> None:
    (cgroups / "memory.max").write_text(str(64 * 1024**2))
    memory = CpuPlatform().memory(0)
    assert memory["total"] == 64 * 1024**2
    assert memory["used"] <= memory["total"]


@pytest.mark.usefixtures("cgroups")
def test_memory_is_the_hosts_where_nothing_limits_it() -> None:
    assert CpuPlatform().memory(0)["total"] == psutil.virtual_memory().total


def test_cpu_is_always_found_and_says_what_it_saw() -> None:
    probe = CpuPlatform().probe()
    assert probe.found
    assert "cores" in probe.why
    assert "GiB" in probe.why


def test_half_precision_with_a_small_range_is_refused_with_the_way_out() -> None:
    platform = CpuPlatform()
    assert platform.supports("fp32") == ""
    assert platform.supports("bf16") == ""
    assert "bf16" in platform.supports("fp16")
