"""`mistakes.txt`: what people get wrong in a config, and the whole answer to each."""

import os
import re
from pathlib import Path

import pytest

from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.plugins.loader import load_plugins
from roll_core.plugins.registry import Registry

GOLDEN = Path(__file__).with_name("mistakes.txt")
REGISTRY = Registry(load_plugins(environ={"ROLL_PLUGINS": ""})[:1])  # roll-core's own, whatever else is installed


def read_cases():
    """title -> {section: text}, in order."""
    cases = {}
    for block in re.split(r"^=== ", GOLDEN.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, rest = block.partition("\n")
        sections = re.split(r"^--- (\S+)\n", rest, flags=re.MULTILINE)[1:]
        cases[title] = {name: text.strip("\n") for name, text in zip(sections[::2], sections[1::2], strict=True)}
    return cases


CASES = read_cases()


def answer(sections, folder: Path) -> str:
    overrides = sections.get("overrides", "").splitlines()
    files = [name for name in sections if name not in ("overrides", "answer")]
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(sections[name] + "\n" if sections[name] else "", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load(Path(files[0]), overrides, REGISTRY)
    return str(raised.value)


@pytest.mark.parametrize("title", CASES)
def test_each_mistake_gets_the_whole_answer(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLL_TEST_SECRET", "hunter2")
    monkeypatch.delenv("ROLL_TEST_NOT_SET", raising=False)
    found = answer(CASES[title], tmp_path)
    if os.environ.get("ROLL_UPDATE_GOLDEN"):
        update(title, found)
    else:
        assert found == CASES[title]["answer"]


def test_there_are_at_least_forty_different_mistakes():
    answers = {case["answer"] for case in CASES.values()}
    assert len(answers) >= 40


def test_no_answer_shows_a_secret():
    for case in CASES.values():
        assert "hunter2" not in case["answer"]
        assert "s3cr3t" not in case["answer"]


def update(title: str, found: str) -> None:
    """Write the answer of one case anew."""
    text = GOLDEN.read_text(encoding="utf-8")
    head, marker, rest = text.partition(f"=== {title}\n")
    body, following, tail = rest.partition("\n=== ")
    kept = re.split(r"^--- answer\n", body, flags=re.MULTILINE)[0].rstrip("\n")
    GOLDEN.write_text(f"{head}{marker}{kept}\n--- answer\n{found}\n{following}{tail}", encoding="utf-8")
