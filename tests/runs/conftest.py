"""Runs small enough for tests: a one-layer model, digits to be sorted, a few steps."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roll_core.builtin.cpu import CpuPlatform
from roll_core.plugins.registry import load_registry
from roll_executor_ray import instance as ray_instance
from roll_executor_ray.instance import RayInstance
from shared_tests.runs import REWARDS, PipelineRuns


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark as slow what `on_ray` runs on Ray."""
    if item.get_closest_marker("on_ray") and item.get_closest_marker("ray"):
        item.add_marker(pytest.mark.slow(ci=True))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Installs a module beside these tests as the plugin `roll-<its name>`; returns the folder where it is."""

    def install(module: Path) -> Path:
        folder, name = tmp_path / "site", module.stem
        info = folder / f"roll_{name}-1.dist-info"
        info.mkdir(parents=True)
        shutil.copy(module, folder / f"roll_{name}.py")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: roll-{name}\nVersion: 1\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[roll.plugins]\nroll-{name} = roll_{name}\n", encoding="utf-8")
        monkeypatch.syspath_prepend(folder)
        return folder

    return install


@pytest.fixture(scope="package")
def connected_ray() -> Iterator[None]:
    """One Ray instance for all tests of whole runs, started as a run starts its own, with room for any test's workers.

    An executor that finds this process connected uses it and leaves it running. It ends with the last of these tests:
    tests of other packages connect this process to a Ray of their own.
    """
    instance = RayInstance(CpuPlatform())
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setattr(ray_instance, "usable_cores", lambda: 8)
        instance.open()
    yield
    instance.close()


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def runs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineRuns:
    """Every test that uses it runs on both executors: pipelines cannot tell them apart.

    Starting workers takes Ray longer than the run itself. Without `ROLL_EVERY_EXECUTOR=1`, which `.ci/run full` sets,
    only the tests marked `on_ray` run there, as slow tests of CI; the repository's conftest.py leaves the others out.
    """
    if request.param == "ray":
        request.getfixturevalue("connected_ray")
    return _prepare(request.param, tmp_path, monkeypatch)


@pytest.fixture(params=[pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def ray_runs(
    request: pytest.FixtureRequest, connected_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PipelineRuns:
    """For what only several workers can show."""
    return _prepare(request.param, tmp_path, monkeypatch)


@pytest.fixture
def local_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineRuns:
    """For faults that are put into this process."""
    return _prepare("local", tmp_path, monkeypatch)


@pytest.fixture
def sockets(local_runs: PipelineRuns, install: Callable[[Path], Path]) -> Iterator[PipelineRuns]:
    """Runs with the executor `sockets` of a third party: each worker is a process."""
    install(Path(__file__).with_name("socket_executor.py"))
    local_runs.registry = load_registry()
    yield local_runs
    sys.modules.pop("roll_socket_executor", None)


def _prepare(executor: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineRuns:
    (folder / "rollrewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    return PipelineRuns(folder, executor)
