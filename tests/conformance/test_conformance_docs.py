"""docs/conformance.md has every test, every attribute and the bounds, and its example works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll_core.testing import PlatformConformance, TrainStrategyConformance
from roll_core.testing.bounds import BOUNDS, SPLIT
from roll_core.testing.subject import Subject

TEXT = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")
STRATEGIES, _, PLATFORMS = TEXT.partition("\n## Is my platform right?\n")
INTERNAL = {"provider", "can", "pytest_generate_tests", "models", "case", "need", "need_training"}
INTERNAL |= {"run", "scored", "trained", "reference", "batch", "sizes", "dtypes", "platform_here"}
PUBLIC = sorted(name for name in vars(Subject) if not name.startswith("_") and name not in INTERNAL)


@pytest.mark.parametrize(("text", "kit"), [(STRATEGIES, TrainStrategyConformance), (PLATFORMS, PlatformConformance)])
def test_every_test_has_its_line_and_no_other(text, kit):
    tests = sorted(name for name in dir(kit) if name.startswith("test_"))
    assert sorted(re.findall(r"^\| `(test_\w+)` \| \S", text, flags=re.MULTILINE)) == tests


@pytest.mark.parametrize("name", PUBLIC)
def test_what_an_author_may_say_is_explained(name):
    assert re.search(rf"^\| `{name}(\([\w, ]*\))?` \| \S", TEXT, flags=re.MULTILINE)


def test_the_bounds_are_those_of_the_code():
    def row(*values):
        return "| " + " | ".join(f"{value:g}".replace("0.0001", "1e-4").replace("e-0", "e-") for value in values) + " |"

    each = [BOUNDS[dtype] for dtype in ("fp32", "bf16", "fp16")]
    for values in ([b.outputs for b in each], [b.gradient for b in each], [b.steps for b in each]):
        assert row(*values) in TEXT
    assert f"different ways, distance {row(SPLIT)}" in TEXT


@pytest.mark.parametrize(("text", "kit"), [(STRATEGIES, TrainStrategyConformance), (PLATFORMS, PlatformConformance)])
def test_the_example_is_a_class_of_tests(text, kit):
    code = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1]
    names: dict[str, object] = {}
    exec(code, names)  # our own page
    assert issubclass(names["TestMine"], kit)
