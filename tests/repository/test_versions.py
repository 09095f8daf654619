"""Versions and ranges between packages agree, and records say what metadata says."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from roll_core.plugins.loader import load_plugins
from roll_core.plugins.requirements import alternatives

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tools" / "versions.py"
PROJECTS = {
    file.parent.name: tomllib.loads(file.read_text())["project"]
    for file in (REPOSITORY / "packages").glob("*/pyproject.toml")
}


def versions(root: Path, *words: str) -> int:
    return subprocess.run([sys.executable, str(root / "tools" / "versions.py"), *words], check=False).returncode


def test_the_repository_s_versions_agree():
    assert versions(REPOSITORY) == 0


def test_every_package_requires_a_torch_with_the_used_features():
    """`torch.accelerator` has memory functions from 2.9 on, cuBLAS is deterministic without a setting from 2.10 on."""
    floors = {}
    for name, project in PROJECTS.items():
        optional = project.get("optional-dependencies", {}).values()
        for text in [*project["dependencies"], *(each for group in optional for each in group)]:
            requirement = Requirement(text)
            if requirement.name in ("torch", "torch-npu"):
                floors[name] = next(each.version for each in requirement.specifier if each.operator in (">=", "=="))
    assert len(floors) >= 9
    too_old = {name: floor for name, floor in floors.items() if Version(floor) < Version("2.11")}
    assert not too_old


def test_new_version_updates_every_range_of_the_package(tmp_path):
    (tmp_path / "tools").mkdir()
    shutil.copy(SCRIPT, tmp_path / "tools")
    for name in ("roll-core", "roll-modeling", "roll-strategy-hf"):
        for file in ("pyproject.toml", f"src/{name.replace('-', '_')}/__init__.py"):
            (tmp_path / "packages" / name / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / "packages" / name / file, tmp_path / "packages" / name / file)
    template = Path("packages", "roll-testing", "src", "roll_testing", "templates", "executor", "pyproject.toml")
    (tmp_path / template).parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / template, tmp_path / template)
    assert versions(tmp_path, "roll-modeling=2.5.1") == 0
    project = tomllib.loads((tmp_path / "packages" / "roll-strategy-hf" / "pyproject.toml").read_text())["project"]
    assert "roll-modeling[lora]>=2.5,<2.6" in project["dependencies"]
    assert PROJECTS["roll-strategy-hf"]["version"] == project["version"]
    assert versions(tmp_path, "roll-core=1.0.0rc1") == 0
    core = tmp_path / "packages" / "roll-core"
    assert '__version__ = "1.0.0rc1"' in (core / "src" / "roll_core" / "__init__.py").read_text()
    written = tomllib.loads((tmp_path / template).read_text())["project"]
    assert written["dependencies"] == ["roll-core>=1.0.0rc1,<1.1"]
    assert written["version"] == tomllib.loads((REPOSITORY / template).read_text())["project"]["version"]
    modeling = (tmp_path / "packages" / "roll-modeling" / "pyproject.toml").read_text()
    assert '"roll-core>=1.0.0rc1,<1.1"' in modeling
    (core / "pyproject.toml").write_text((core / "pyproject.toml").read_text().replace("1.0.0rc1", "1.1.0"))
    assert versions(tmp_path) == 1


@pytest.mark.parametrize("word", ["roll-nothing=1.0.0", "roll-core=soon", "roll-core"])
def test_a_wrong_word_changes_nothing(word):
    assert versions(REPOSITORY, word) == 2


def test_constraints_pin_what_the_packages_require():
    """RELEASING.md says how `constraints.txt` is made."""
    workspace = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["uv"]
    pins: dict[str, list[str]] = {}
    for pin in map(Requirement, (REPOSITORY / "constraints.txt").read_text().splitlines()):
        (version,) = pin.specifier
        # A build of one index, such as torch's for a CPU, would not install from another.
        assert (version.operator, pin.url, "+" in version.version) == ("==", None, False), pin
        pins.setdefault(pin.name, []).append(version.version)
    required = [each for project in PROJECTS.values() for each in project["dependencies"]]
    wanted = list(map(Requirement, [*required, *workspace["constraint-dependencies"]]))
    left_out = {*PROJECTS, *(Requirement(each).name for each in workspace["override-dependencies"])}
    theirs = [each for each in wanted if each.name not in left_out]
    assert theirs
    assert [each for each in theirs if not any(map(each.specifier.contains, pins.get(each.name, ())))] == []


def test_a_record_needs_what_its_distribution_requires():
    for plugin in load_plugins(environ={}):
        if plugin.package not in PROJECTS:
            continue
        project = PROJECTS[plugin.package]
        extras = project.get("optional-dependencies", {}).values()
        listed = [*project["dependencies"], *(each for extra in extras for each in extra)]
        required = {(each.name, str(each.specifier)) for each in map(Requirement, listed)}
        for record in plugin.providers:
            for need in record.needs:
                first = Requirement(alternatives(need)[0])
                assert (first.name, str(first.specifier)) in required, f"{plugin.package}: {record.name}"


def test_every_roll_plugin_is_an_extra_of_the_core():
    named = {
        Requirement(each).name for extra in PROJECTS["roll-core"]["optional-dependencies"].values() for each in extra
    }
    plugins = {name for name, project in PROJECTS.items() if "roll.plugins" in project.get("entry-points", {})}
    assert plugins - {"roll-core"} == {name for name in named if name.startswith("roll-")} - {"roll-kernels"}


def test_no_file_names_a_package_index():
    index = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|--(extra-)?index-url[ =]http")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    files = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    texts = {file: file.read_text(encoding="utf-8", errors="ignore") for file in files if file.is_file()}
    assert len(texts) > 1000
    assert [str(file) for file, text in texts.items() if index.search(text)] == []
