"""`[tool.roll.peers.NAME]` has the packages that its tests import: it runs only if it is named."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECTS = {
    file.parent.name: tomllib.loads(file.read_text())["project"]
    for file in REPOSITORY.glob("packages/*/pyproject.toml")
}
PEERS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["roll"]["peers"]


def installed(names):
    """The packages and those of ours that they require."""
    required = {re.match(r"[\w-]+", each)[0] for name in names for each in PROJECTS[name]["dependencies"]}
    further = required & set(PROJECTS) - set(names)
    return installed([*names, *further]) if further else set(names)


def imported(file):
    """Our packages that a test's module imports at its top."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        modules = (
            [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in getattr(node, "names", ())]
        )
        found |= {module.partition(".")[0].replace("_", "-") for module in modules if module}
    return found & set(PROJECTS)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_has_the_packages_that_its_tests_import(name):
    for test in (REPOSITORY / each for each in PEERS[name]["tests"]):
        conftests = [folder / "conftest.py" for folder in test.parents if (folder / "conftest.py").is_file()]
        for file in (test, *conftests):
            assert imported(file) <= installed(PEERS[name]["packages"]), file
