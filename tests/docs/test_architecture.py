"""The page `docs/architecture.md` names files, classes and methods that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
SPANS = sorted(set(re.findall(r"`([^`\n]+)`", PAGE.partition("## Size")[0])))
CORE = REPOSITORY / "packages" / "roll-core" / "src" / "roll_core"


def members(classes: set[str]) -> dict[str, set[str]]:
    """Names of methods of these classes, over all packages."""
    found: dict[str, set[str]] = {}
    defined = re.compile(rf"^ *class ({'|'.join(sorted(classes))})\b", re.MULTILINE)
    for path in REPOSITORY.glob("packages/*/src/**/*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if defined.search(text) else ():
            if isinstance(node, ast.ClassDef):
                mine = found.setdefault(node.name, set())
                for each in ast.walk(node):
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                        mine.add(each.name)
    return found


@pytest.mark.parametrize("path", [each for each in SPANS if re.fullmatch(r"[\w/]+/\w+\.py", each)])
def test_a_file_of_the_page_exists(path: str) -> None:
    assert (CORE / path).is_file()


def test_classes_and_methods_of_the_page_exist() -> None:
    named = [each.split(".") for each in SPANS if re.fullmatch(r"_?[A-Z]\w+(\.\w+)?", each)]
    known = members({each[0] for each in named})
    wrong = [".".join(each) for each in named if each[0] not in known or not known[each[0]].issuperset(each[1:])]
    assert len(named) > 20
    assert not wrong
