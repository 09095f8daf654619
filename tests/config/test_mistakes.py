"""`mistakes.txt`: what people get wrong in a config; the code, place and key of each mistake, and what it names."""

import difflib
import os
import re
import sys
from pathlib import Path

import pytest

from roll_core.config import load
from roll_core.config.explain import PATTERNS
from roll_core.config.unknown_keys import MAX_SUGGESTIONS
from roll_core.errors import ConfigError
from roll_core.plugins.registry import Registry
from shared_tests.hf_plugins import hf_plugins

GOLDEN = Path(__file__).with_name("mistakes.txt")
PACKAGES = Path(__file__).resolve().parents[2] / "packages"
REGISTRY = Registry(hf_plugins())


def read_cases():
    """title -> {section: text}, in order."""
    cases = {}
    for block in re.split(r"^=== ", GOLDEN.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, rest = block.partition("\n")
        sections = re.split(r"^--- (\S+)\n", rest, flags=re.MULTILINE)[1:]
        cases[title] = {name: text.strip("\n") for name, text in zip(sections[::2], sections[1::2], strict=True)}
    return cases


CASES = read_cases()
SECRETS = ("hunter2", "s3cr3t")
NAME = re.compile(
    r"""'[^']*'                                   # quoted: a value or a name
    | (?<=did\ you\ mean\ )[^?]+
    | \$?\{[^}]*\}                               # an interpolation
    | [\w/+-]*[._/=][\w./=-]*\w                 # a key, a file, an override
    | (?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.])
    | \b[A-Z]{2,}\b""",
    re.VERBOSE,
)
"""What a message names: keys, values, files, numbers; its other words may change."""


def located(problem) -> str:
    """`file:line:column code key [names]`."""
    names = sorted(set(NAME.findall(f"{problem.message}\n{problem.hint}")))
    return " ".join(filter(None, (problem.where, problem.code, problem.key, names and f"[{', '.join(names)}]")))


def answer(sections, folder: Path) -> str:
    overrides = sections.get("overrides", "").splitlines()
    files = [name for name in sections if name not in ("overrides", "answer")]
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(sections[name] + "\n" if sections[name] else "", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load(Path(files[0]), overrides, REGISTRY)
    assert not {secret for secret in SECRETS if secret in str(raised.value)}
    return "\n".join(map(located, raised.value.problems))


@pytest.mark.parametrize("title", CASES)
def test_every_error_is_located_and_shows_no_secret(title, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))  # remedies then say `pip install`
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


SFT = """\
pipeline: sft
sft_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""


def problems(text, *overrides):
    """(line, column, key) of each."""
    Path("run.yaml").write_text(SFT + text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load(Path("run.yaml"), overrides, REGISTRY)
    return [(*map(int, each.where.split(":")[1:]), each.key) for each in raised.value.problems]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("exp_name: ..", [(5, 11, "exp_name")]),
        ("exp_name: .", [(5, 11, "exp_name")]),
        (f"exp_name: {'é' * 128}", [(5, 11, "exp_name")]),
        (f"seed: {2**64}", [(5, 7, "seed")]),
        (f"seed: {1 << 4096:#x}", [(5, 7, "seed")]),
        (f"exp_name: {1 << 20_000:#x}", [(5, 11, "exp_name")]),
        ('output_dir: "a\\0b"', [(5, 13, "output_dir")]),
        (
            f"validation: {{data_args: {{}}, generating_args: {{seed: {2**64}}}}}",
            [(5, 53, "validation.generating_args.seed")],
        ),
        ("system_envs: {GOOD: 1, A=B: x}", [(5, 24, "system_envs.A=B")]),
        ("system_envs: {MY VAR: x, '': y}", [(5, 15, "system_envs.MY VAR"), (5, 26, "system_envs.")]),
        ('system_envs: {GOOD: "a\\0b"}', [(5, 21, "system_envs.GOOD")]),
        ("true: 1", [(5, 1, "true")]),
        ("off: 1", [(5, 1, "false")]),
        ("system_envs: {on: x}", [(5, 15, "system_envs.true")]),
    ],
)
def test_values_that_no_run_can_have_are_mistakes(tmp_path, monkeypatch, text, found):
    monkeypatch.chdir(tmp_path)
    assert problems(text) == found


def test_values_at_the_limits_are_good(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"exp_name: ..{'é' * 126}a\nseed: {2**64 - 1}\nsystem_envs: {{_a.B-1: '', ProgramFiles(x86): 1}}\n"
    Path("run.yaml").write_text(SFT + text, encoding="utf-8")
    assert load(Path("run.yaml"), (), REGISTRY).config.seed == 2**64 - 1


def test_unknown_keys_are_all_reported_but_few_are_compared(tmp_path, monkeypatch):
    compared = []
    matches = difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", lambda *args: compared.append(args) or matches(*args))
    monkeypatch.chdir(tmp_path)
    found = problems("".join(f"max_step_{at}: 1\n" for at in range(3000)))
    assert found == [(5 + at, 1, f"max_step_{at}") for at in range(3000)]
    assert len(compared) <= 8 * MAX_SUGGESTIONS


def update(title: str, found: str) -> None:
    """Write the answer of one case anew."""
    text = GOLDEN.read_text(encoding="utf-8")
    head, marker, rest = text.partition(f"=== {title}\n")
    body, following, tail = rest.partition("\n=== ")
    kept = re.split(r"^--- answer\n", body, flags=re.MULTILINE)[0].rstrip("\n")
    GOLDEN.write_text(f"{head}{marker}{kept}\n--- answer\n{found}\n{following}{tail}", encoding="utf-8")


def test_the_patterns_that_have_words_are_those_of_schemas():
    sources = [path.read_text(encoding="utf-8") for path in PACKAGES.glob("*/src/**/*.py") if "config" in str(path)]
    assert [each for each in PATTERNS if not any(f'pattern=r"{each}"' in text for text in sources)] == []
