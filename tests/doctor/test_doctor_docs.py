"""docs/doctor.md has every check that our packages offer, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from roll_core.plugins.registry import load_registry
from roll_core.spec.providers import CheckProvider
from roll_testing.part_checks import check_part
from roll_tools.examination import LEVELS

TEXT = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")


def ours() -> list[CheckProvider]:
    return [record for record in load_registry().providers(CheckProvider) if record.target.startswith("roll_")]


def test_every_check_has_its_row_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \| \S", TEXT, re.MULTILINE)
    assert sorted(rows) == sorted(each.name for each in ours())


def test_every_level_is_explained() -> None:
    assert re.findall(r"^\| \S \| (\w+) \| \S", TEXT, re.MULTILINE) == list(LEVELS)


def test_every_check_can_be_imported() -> None:
    for record in ours():
        check_part(record, owner=record.name)
