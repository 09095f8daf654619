"""docs/troubleshooting.md has a section for each error that our packages recognise. ROLL_UPDATE_GOLDEN=1 updates it."""

from __future__ import annotations

import os
import re
import textwrap
from collections import Counter
from pathlib import Path

from roll_core.errors import PluginLoadError
from roll_core.plugins.registry import load_registry
from roll_core.plugins.targets import load_target
from roll_core.spec.diagnostics import KnownError
from roll_core.spec.providers import KnownErrorsProvider
from roll_testing.errors import raises_error
from roll_testing.part_checks import check_part

DOCS = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
BEGIN = "<!-- sections: made by tests/known_errors/test_troubleshooting_docs.py -->\n"
END = "<!-- end of sections -->"


def ours() -> list[tuple[str, KnownError]]:
    """With the package that lists each."""
    registry = load_registry()
    return [
        (record.target.partition(".")[0].replace("_", "-"), known)
        for record in registry.providers(KnownErrorsProvider)
        if record.target.startswith("roll_")
        for known in load_target(record.target, owner=record.name)
    ]


def sections() -> str:
    text = ""
    for package, each in ours():
        where = f" During {', '.join(f'`{name}`' for name in each.during)} of a worker." if each.during else ""
        cause, remedy = (
            textwrap.fill(each, 100, break_long_words=False, break_on_hyphens=False)
            for each in (f"{each.cause}{where}", f"What to do: {each.remedy}.")
        )
        text += f"### {each.id}\n\n{cause}\n\n{remedy}\n\nPattern of `{package}`:\n\n    {each.pattern}\n\n"
    return text


def test_the_sections_are_those_of_the_code():
    before, begin, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    wanted = f"{before}{begin}{sections()}{END}{rest.partition(END)[2]}"
    if os.environ.get("ROLL_UPDATE_GOLDEN"):
        DOCS.write_text(wanted, encoding="utf-8")
    assert DOCS.read_text(encoding="utf-8") == wanted


def test_every_list_is_a_tuple_of_known_errors_with_unique_ids():
    assert all(isinstance(known, KnownError) for _, known in ours())
    assert max(Counter(known.id for _, known in ours()).values()) == 1


def test_links_within_the_page_lead_somewhere():
    text = DOCS.read_text(encoding="utf-8")
    headings = set(re.findall(r"^### (\w+)$", text, re.MULTILINE))
    assert set(re.findall(r"\(#(\w+)\)", text)) <= headings


def test_a_list_that_is_none_is_a_broken_part(tmp_path, monkeypatch):
    (tmp_path / "acme_list_of_a_test.py").write_text("KNOWN = ['No space left']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    record = KnownErrorsProvider(name="acme", target="acme_list_of_a_test:KNOWN", summary="Acme's")
    with raises_error(PluginLoadError, "KnownError"):
        check_part(record, owner="acme")
