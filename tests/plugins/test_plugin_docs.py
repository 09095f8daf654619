"""docs/plugins.md is complete: every hook with its arguments, every field of every record."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from roll_core.spec import hooks, providers

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"
TEXT = DOCS.read_text(encoding="utf-8")
HOOKS = [name for name in vars(hooks) if name.startswith("roll_")]
RECORDS = [name for name in vars(providers) if name.endswith(("Provider", "Capabilities")) and name != "Provider"]


def section(title):
    """The text under a heading, down to the next heading of any level."""
    return re.split(r"^#", TEXT.partition(f"{title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_a_section_with_its_arguments(name):
    arguments = ", ".join(inspect.signature(getattr(hooks, name)).parameters)
    assert f"### `{name}({arguments})`\n" in TEXT
    assert len(section(f"### `{name}({arguments})`").split()) > 10


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_of_every_record_is_explained(name):
    heading = re.search(rf"^### .*\b{name}\b.*$", TEXT, flags=re.MULTILINE)
    assert heading is not None
    explained = section(heading[0]) + (section("## Records") if name.endswith("Provider") else "")
    for field in fields(getattr(providers, name)):
        assert re.search(rf"^- `{field.name}`: \S", explained, flags=re.MULTILINE), field.name


def test_every_kind_of_record_is_named_under_its_hook():
    for name in RECORDS:
        if name.endswith("Provider"):
            assert any(f"`{name}` records" in section(f"### `{hook}()`") for hook in HOOKS)
