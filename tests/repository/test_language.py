"""`tools/language.py` finds docstrings outside the glossary or that do not stand alone."""

import importlib.util
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def language():
    spec = importlib.util.spec_from_file_location("language", REPOSITORY / "tools" / "language.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("docstring", "is_wrong"),
    [
        ("Sampled tokens of the response.", False),
        ("`tracker_kwargs.acme`.", False),
        ("Of the platforms that were found, the one with the highest priority.", False),
        ("Of its groups.", True),
        ("Whether they do.", True),
        ("So many.", True),
        ("Distillation.", True),
        ("Tokens drawn by the engine.", True),
        ("Tokens that `drawn` contains.", False),
    ],
)
@pytest.mark.parametrize("place", ['"""{}"""\n', 'class A:\n    """{}"""\n', 'class A:\n    b: int\n    """{}"""\n'])
def test_docstrings_use_the_glossary_and_stand_alone(tmp_path, language, place, docstring, is_wrong):
    file = tmp_path / "module.py"
    file.write_text(place.format(docstring), encoding="utf-8")
    assert bool(list(language.source(file))) is is_wrong


@pytest.mark.parametrize(
    ("code", "num"),
    [
        ("[each for each in rows]", 1),
        ("def f(given, row):\n    at = given\n", 2),
        ("for found, row in rows:\n    print(found)", 1),
        ("class A:\n    kept: int = 0", 1),
        ("print(each.found, found)", 0),
        ("f(given=1)", 0),
        ("[row for row in rows]", 0),
    ],
)
def test_variables_with_vague_names_are_counted(tmp_path, language, code, num):
    file = tmp_path / "module.py"
    file.write_text(code, encoding="utf-8")
    assert len(list(language.vague_names(file))) == num


@pytest.mark.parametrize(
    ("code", "num"),
    [
        ("def test_partial_responses_resume_after_restart(): ...", 0),
        ("def helper_of_what_is_drawn(): ...", 0),
        ("class TestQueue:\n    async def test_what_is_drawn_is_kept(self): ...", 2),
        (f"def test_{'x' * 55}(): ...", 0),
        (f"def test_{'x' * 56}(): ...", 1),
        ("def test_each_row_is_read(): ...", 1),
        ('"""Tokens that nobody sampled."""', 1),
    ],
)
def test_names_of_tests_use_the_glossary(tmp_path, language, code, num):
    file = tmp_path / "test_module.py"
    file.write_text(code, encoding="utf-8")
    assert len(list(language.names_of_tests(file))) == num
