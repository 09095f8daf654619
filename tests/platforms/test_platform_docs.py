"""docs/platforms.md has what the platforms say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll_core.plugins.registry import load_registry
from roll_core.runtime.cluster.platform import make_platform
from roll_core.spec.platform import Platform, RoleKind
from roll_core.spec.providers import PlatformProvider

TEXT = (Path(__file__).parents[2] / "docs" / "platforms.md").read_text(encoding="utf-8")
COMPUTING: tuple[RoleKind, ...] = ("train", "score", "generate")
OURS = ("cpu", "cuda", "rocm", "npu")


def platform(name: str) -> Platform:
    return make_platform(load_registry().find(PlatformProvider, name))


@pytest.mark.parametrize("name", OURS)
def test_every_variable_has_its_row_with_value_and_roles(name: str) -> None:
    expected: dict[tuple[str, str], list[str]] = {}
    for kind in COMPUTING:
        for each in platform(name).environment(kind, (0,)):
            value = f"`{each.value}`{', needed' if each.required else ''}"
            expected.setdefault((each.name, value), []).append(kind)
    rows = re.findall(rf"^\| `{name}` \| `(\w+)` \| (`[\w:]+`(?:, needed)?) \| ([\w, ]+) \| \S", TEXT, re.MULTILINE)
    found = {(variable, value): roles for variable, value, roles in rows}
    assert found == {
        key: "all" if len(kinds) == len(COMPUTING) else ", ".join(kinds) for key, kinds in expected.items()
    }


@pytest.mark.parametrize("name", OURS)
def test_the_table_of_platforms_is_true(name: str) -> None:
    row = re.search(rf"^\| `{name}` \| roll-(?:core|platform-{name}) \| (.*)$", TEXT, re.MULTILINE)
    assert row is not None
    _, device, resource, collective, restricted = (cell.strip(" |") for cell in row[1].split(" | "))
    here = platform(name)
    assert device == f"`{here.device(7).replace('7', '<i>')}`"
    assert resource == f"`{here.resource_name}`"
    assert collective.split()[0] == here.collective_backend
    names = [each for each in (here.visible_devices, *here.also_visible_devices) if each]
    assert restricted == (" and ".join(f"`{each}`" for each in names) or "–")
