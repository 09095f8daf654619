"""Stable codes: one for each class of error, all documented. ROLL_UPDATE_DOCS=1 rewrites the tables of the page."""

import inspect
import os
import pickle
import re
import textwrap
from pathlib import Path

import pytest

from roll_core import errors
from roll_core.errors import CONFIG_CODES, ConfigError, ConfigProblem, DataError, RollError
from roll_testing.errors import check_error, is_prose, raises_error

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, RollError)]


def tables():
    """Heading of a section of the page -> the list that belongs under it."""
    config = [f"- `{code}` {meaning}" for code, meaning in CONFIG_CODES.items()]
    classes = []
    for each in sorted(CLASSES, key=lambda cls: cls.code):
        meaning = " ".join(inspect.getdoc(each).split("\n\n")[0].split())
        text = f"`{each.code}` `{each.__name__}`, exit code {each.exit_code}. {meaning}"
        classes += textwrap.wrap(text, 100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    return {"config codes": config, "classes": classes}


def test_the_page_lists_every_code():
    text = PAGE.read_text(encoding="utf-8")
    expected = text
    for name, lines in tables().items():
        begin = re.escape(f"<!-- {name}: made by tests/repository/test_error_codes.py -->\n")
        body = "\n".join(lines)
        expected = re.sub(rf"({begin}).*?(<!-- end -->)", rf"\g<1>\n{body}\n\n\g<2>", expected, flags=re.DOTALL)
    if os.environ.get("ROLL_UPDATE_DOCS"):
        PAGE.write_text(expected, encoding="utf-8")
    else:
        assert text == expected


def test_every_error_class_has_a_unique_code():
    assert all("code" in vars(each) for each in CLASSES)
    codes = [each.code for each in CLASSES] + list(CONFIG_CODES)
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"ROLL-[CDMPRSWX]\d{3}", each) for each in codes)


def test_codes_written_in_the_sources_exist():
    known = {each.code for each in CLASSES} | set(CONFIG_CODES)
    sources = [each for each in PAGE.parents[1].glob("packages/*/src/**/*.py") if each.parent.name != "testing"]
    written = {code for each in sources for code in re.findall(r"ROLL-[A-Z]\d{3}", each.read_text(encoding="utf-8"))}
    assert written <= known


def test_users_see_the_code_before_the_message():
    assert pickle.loads(pickle.dumps(DataError("a.jsonl: empty"))).described() == "ROLL-D001 a.jsonl: empty"
    problems = [ConfigProblem("run.yaml:2:1", "sede", "?", code="ROLL-C010"), ConfigProblem("run.yaml", "", "?")]
    assert ConfigError(problems).described().splitlines() == [
        "run.yaml:2:1: ROLL-C010 sede: ?",
        "run.yaml: ROLL-C001 ?",
    ]


@pytest.mark.parametrize(
    "fact", ["actor_infer rank 3", "rank 1 on h9", "step 4", "'x'", "roll-acme 2.1", "kv_cache_gib"]
)
def test_a_located_fact_is_no_prose(fact):
    assert not is_prose(fact)


@pytest.mark.parametrize("text", ["is damaged", "no such column", "found 3, but only two of these"])
def test_sentences_are_prose(text):
    assert is_prose(text)
    with pytest.raises(ValueError, match="prose"), raises_error(DataError, text):
        raise DataError(text)


def test_refused_has_code_place_key_and_facts():
    error = ConfigError([ConfigProblem("a.yaml:1:2", "x.y", "found 12", code="ROLL-C013")])
    check_error(error, "ROLL-C013", "12", at="a.yaml:1:2", key="x.y")
    for kind, fact, at, key in [
        ("ROLL-C010", "12", "", ""),
        ("ROLL-C013", "2.5", "", ""),
        ("ROLL-C013", "12", "a.yaml:1:3", ""),
        ("ROLL-C013", "12", "", "x"),
    ]:
        with pytest.raises(AssertionError):
            check_error(error, kind, fact, at=at, key=key)
    check_error(DataError("row 12"), "ROLL-D001", "row 12")
    for kind, fact in [("ROLL-D002", "row 12"), ("ROLL-D001", "row 1")]:
        with pytest.raises(AssertionError):
            check_error(DataError("row 12"), kind, fact)
