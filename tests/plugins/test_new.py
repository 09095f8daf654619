"""`roll-core new` writes packages that are found; `roll-core plugins test` runs kits by name.

`test_pip_install.py` of the repository installs them and runs their tests.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from roll_core.cli.main import main
from roll_core.plugins.loader import load_plugins
from roll_core.plugins.registry import Registry
from roll_testing.errors import mentions
from roll_testing.new import EXAMPLES, KINDS, TEMPLATES, name_problem, write_package
from roll_testing.part_checks import check_part


def build(folder, site):
    """The wheel of a package, unpacked into `site`: an installation without a network."""
    for wheel in WheelBuilder(str(folder)).build(directory=str(site.parent / "dist"), versions=["standard"]):
        zipfile.ZipFile(wheel).extractall(site)


@pytest.mark.parametrize("kind", KINDS)
def test_a_generated_package_has_no_trace_of_the_template(kind, tmp_path):
    assert main(["new", kind, "my_part", "--dir", str(tmp_path)]) == 0
    folder = tmp_path / f"roll-{kind}-my-part"
    files = [each for each in folder.rglob("*") if each.is_file()]
    assert not [each for each in files if "acme" in (str(each.relative_to(folder)) + each.read_text()).lower()]
    names = {str(each.relative_to(folder)) for each in files}
    home = f"roll_{kind}_my_part"
    assert names >= {
        *("pyproject.toml", "README.md", "LICENSE", ".github/workflows/tests.yml", "tests/test_conformance.py"),
        *(f"{home}/__init__.py", f"{home}/plugin.py"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_generated_part_is_found_and_fits_its_contract(kind, tmp_path, monkeypatch):
    write_package(kind, "fresh-part", tmp_path / "package")
    site = tmp_path / "site"
    build(tmp_path / "package", site)
    monkeypatch.syspath_prepend(str(site))
    registry = Registry(load_plugins(path=[str(site)], environ={}))
    record = registry.find(KINDS[kind], "fresh_part")
    if kind not in ("strategy", "infer"):  # they import transformers: the package's own tests, below, import them
        check_part(record, owner=registry.owner(record))


@pytest.mark.parametrize(
    "name",
    ["", "My_part", "1st", "a--b", "a_", "_a", "a.b", "a/b", "../a", "é", "roll-reward-mine", "x" * 41, "math_rule"],
)
def test_names_that_no_part_can_have_are_refused(name, tmp_path):
    assert repr(name) in name_problem("reward", name)
    with pytest.raises(SystemExit) as ended:
        main(["new", "reward", name, "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_as_it_is(tmp_path):
    (tmp_path / "roll-reward-mine").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["new", "reward", "mine", "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert not list((tmp_path / "roll-reward-mine").iterdir())


@pytest.mark.parametrize("kind", [*EXAMPLES, "rewart"])
def test_a_kind_without_template_is_refused(kind, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["new", kind, "mine", "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert mentions(capsys.readouterr().err, "argument KIND", kind, EXAMPLES.get(kind, "reward"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", EXAMPLES.values())
def test_sections_with_examples_exist(place):
    page, _, anchor = place.partition("#")
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert anchor in [re.sub(r"[^\w -]", "", heading).replace(" ", "-").lower() for heading in headings]


def test_every_kind_has_a_template():
    assert {each.name for each in TEMPLATES.iterdir()} - {"shared"} == set(KINDS)


def test_a_plugin_that_is_not_installed_is_refused(capsys):
    assert main(["plugins", "test", "roll-rewarts"]) == 2
    assert "roll-rewards" in capsys.readouterr().err
