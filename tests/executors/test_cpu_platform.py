import os
from pathlib import Path

import psutil
import pytest

from roll_core import host
from roll_core.builtin.cpu import CpuPlatform


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


@pytest.mark.parametrize(
    ("folder", "names", "stat"),
    [
        ("", ("memory.max", "memory.current"), "anon 1000\nfile 900\ninactive_file 300\nactive_file 200\nshmem 400\n"),
        (
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "inactive_file 7\nactive_file 7\ntotal_inactive_file 300\ntotal_active_file 200\n",
        ),
    ],
)
def test_cgroup_memory_is_not_free_except_file_cache(
    cgroups: Path, folder: str, names: tuple[str, str], stat: str
) -> None:
    """Shared memory is held, though it is counted with the files."""
    group = cgroups / folder
    group.mkdir(exist_ok=True)
    for name, value in zip((*names, "memory.stat"), ("10000", "2500", stat), strict=True):
        (group / name).write_text(value)
    assert host.free_memory_bytes() == 10000 - (2500 - 500)
    assert CpuPlatform().memory(0) == {"total": 10000, "used": 2000}


def test_cgroup_over_limit_has_none_free_and_without_stats_all(cgroups: Path) -> None:
    (cgroups / "memory.max").write_text("10000")
    assert host.free_memory_bytes() == 10000
    (cgroups / "memory.current").write_text("10001")
    assert host.free_memory_bytes() == 0


def test_the_cgroup_with_least_left_counts(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer one may be full of what others hold."""
    inner = cgroups / "job" / "task"
    inner.mkdir(parents=True)
    for group, (limit, used) in {cgroups / "job": (10000, 9000), inner: (5000, 100)}.items():
        (group / "memory.max").write_text(str(limit))
        (group / "memory.current").write_text(str(used))
    text = host._text
    monkeypatch.setattr(host, "_text", lambda path: "0::/job/task" if path.name == "cgroup" else text(path))
    assert host.free_memory_bytes() == 1000
    assert host.memory_limit_bytes() == 5000


@pytest.mark.usefixtures("cgroups")
def test_memory_is_the_hosts_where_nothing_limits_it() -> None:
    assert CpuPlatform().memory(0)["total"] == psutil.virtual_memory().total


def test_cpu_is_always_found_and_reports_its_facts() -> None:
    probe = CpuPlatform().probe()
    assert probe.found
    assert "cores" in probe.why
    assert "GiB" in probe.why


def test_fp16_is_refused_with_an_alternative() -> None:
    platform = CpuPlatform()
    assert platform.supports("fp32") == ""
    assert platform.supports("bf16") == ""
    assert "bf16" in platform.supports("fp16")
    assert platform.supports("fp8") == ""
