"""Every package stands in the lists of packages, and requires what it imports."""

import re
import tomllib
from pathlib import Path

import pytest

from roll_testing.packaging import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
NAMES = {package.name for package in PACKAGES}
MODULES = {source.name for package in PACKAGES for source in package.glob("src/*")}
WORKSPACE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINTER = WORKSPACE["tool"]["importlinter"]


def test_workspace_lists_every_package():
    dependencies = {re.split(r"\W*\[", text)[0] for text in WORKSPACE["project"]["dependencies"]}
    assert dependencies == NAMES
    assert set(WORKSPACE["tool"]["uv"]["sources"]) == NAMES
    assert set(LINTER["root_packages"]) == MODULES


def test_import_contract_has_every_package():
    (layers,) = (contract["layers"] for contract in LINTER["contracts"] if "roll_testing" in contract.get("layers", ()))
    assert sorted(re.findall(r"\w+", " ".join(layers))) == sorted(MODULES)


def test_modules_of_core_are_public_or_protected():
    core = ROOT / "packages/roll-core/src/roll_core"
    modules = {
        f"roll_core.{path.stem}" for path in core.iterdir() if path.suffix in ("", ".py") and path.stem[0] != "_"
    }
    protected = {name for contract in LINTER["contracts"] for name in contract.get("protected_modules", ())}
    public = {name for name in PUBLIC if name.startswith("roll_core.")}
    assert modules - protected == public - protected


@pytest.mark.parametrize(
    ("page", "lines"), [("README.md", r"^\| (`roll-.*?) \|"), ("CHANGELOG.md", r"^- \[(roll-.*?)\]")]
)
def test_page_lists_every_package(page, lines):
    """A cell may shorten names: `roll-platform-cuda`, `-rocm`."""
    listed = set()
    for cell in re.findall(lines, (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE):
        names = re.findall(r"[a-z0-9-]+", cell)
        listed |= {names[0].rpartition("-")[0] + name if name.startswith("-") else name for name in names}
    assert listed == NAMES
