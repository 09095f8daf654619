"""Every command in the docs exists, with its options, keys, files, packages and extras. It is parsed, not executed."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from roll_core.cli.main import main
from roll_core.config import load
from roll_core.plugins.registry import load_registry
from shared_tests.docs import RLVR_CONFIG

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "RELEASING.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted(
        page for folder in ("packages", "recipes", "launchers") for page in (REPOSITORY / folder).rglob("README.md")
    ),
]
PLACEHOLDERS = {"CONFIG": "run.yaml", "KIND": "reward", "FILE": "roll.yaml", "RUN": "run"}
OTHERS = ("key=value", "KEY=VALUE", "...", "…")
"""Words for overrides that the reader chooses."""
SFT = """\
pipeline: sft
pretrain: Qwen/Qwen3-0.6B
max_steps: 1
sft_train:
  training_args: {per_device_train_batch_size: 1}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
  device_mapping: [0]
"""
SHORT = {
    **{command: ["run.yaml"] for command in ("run", "check", "plan", "import roll")},
    **{command: ["run"] for command in ("report", "watch", "checkpoint list", "checkpoint verify")},
    "checkpoint convert": ["run", "out"],
    "filter": ["model", "run.yaml", "-o", "rows.jsonl"],
    "new": ["reward", "name"],
    "import": ["roll", "run.yaml"],
}
"""The rest of commands that a sentence names without arguments."""
OF_THE_TUTORIAL = {"first/rlvr.yaml", "first/letters.yaml", "play/agentic.yaml"}
"""Configs that the tutorial writes; `test_tutorial.py` runs their commands."""
CONFIGS = {"grpo.yaml": RLVR_CONFIG, "sums.yaml": RLVR_CONFIG, "sft.yaml": SFT}
"""What an override of a config that the reader writes is checked against."""


def commands(program):
    """Words after this program, with `page:line`, of each different command line, and of each one within a sentence."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        quoted = rf"(?<!`)`({re.escape(program)}(?:\s[^`]*)?)`"
        lines = rf"^(?:    +|(?<=```\n))({re.escape(program)}(?: (?:\\\n|.)*)?)$"
        for match in re.finditer(f"{quoted}|{lines}", text, flags=re.MULTILINE):
            whole = (match[1] or match[2]).replace("\\\n", " ").replace("\n", " ")
            command = re.split(r" {3,}|\s#\s|\s&&\s|\s>\s", whole)[0]
            line = text[: match.start()].count("\n") + 1
            words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command) if word not in OTHERS]
            found.setdefault(tuple(words[len(program.split()) :]), f"{page.relative_to(REPOSITORY)}:{line}")
    return [pytest.param(list(words), id=where) for words, where in found.items()]


class Parsed(BaseException):
    """The arguments of a command were accepted."""


@pytest.mark.parametrize("words", commands("roll-core"))
def test_a_command_of_roll_core_has_these_arguments(words, tmp_path, monkeypatch, capsys):
    def stopping(parse):
        def parse_and_stop(self, *arguments):
            raise Parsed(parse(self, *arguments))

        return parse_and_stop

    named = [word for word in words if not word.startswith("-")]
    if not named or named[0] in ("COMMAND", "NAME") or named[0].startswith("roll-"):
        return  # a placeholder, or names of packages
    for each in words:
        if each.startswith(("examples/", "recipes/")):
            assert (REPOSITORY / each).exists()
    words = [*words, *SHORT.get(" ".join(words), ())]
    with monkeypatch.context() as patched:
        for name in ("parse_args", "parse_intermixed_args"):
            patched.setattr(argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name)))
        with pytest.raises(Parsed):
            main(words)
    overrides = [word for word in words[1:] if re.match(r"[\w.]+=|~", word)]
    configs = [word for word in words[1:] if word.endswith(".yaml") and word not in OF_THE_TUTORIAL]
    if not overrides or words[0] not in ("run", "check", "plan", "doctor"):
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(REPOSITORY))  # where modules of the examples are
    for config in configs:
        if config in CONFIGS:
            Path(config).write_text(CONFIGS[config], encoding="utf-8")
        path = config if config in CONFIGS else REPOSITORY / config
        assert load(path, overrides, load_registry()).config.pipeline


def projects():
    """The extras of each package of the repository, by name."""
    files = [tomllib.loads(file.read_text(encoding="utf-8")) for file in REPOSITORY.glob("packages/*/pyproject.toml")]
    return {each["project"]["name"]: set(each["project"].get("optional-dependencies", {})) for each in files}


def test_packages_and_extras_of_pip_install_exist():
    own, seen = projects(), 0
    for param in commands("pip install"):
        (words,), where = param.values, param.id
        for word in words:
            if word.startswith("packages/"):
                assert (REPOSITORY / word.partition("[")[0] / "pyproject.toml").exists(), where
            elif word.startswith("roll-"):
                wanted = Requirement(word)
                assert wanted.name in own, where
                assert wanted.extras <= own[wanted.name], where
                seen += 1
    assert seen > 50


def test_commands_of_run_and_files_of_python_exist():
    script = (REPOSITORY / "run").read_text(encoding="utf-8")
    known = set(re.findall(r"^  ([a-z-]+)\) ", script, flags=re.MULTILINE)) | {"run", "pip", "build", "publish"}
    for param in commands("./run"):
        (words,) = param.values
        assert not words or words[0] in known, param.id
        if words[:1] == ["bench"] and len(words) > 1 and words[1] != "NAME":
            assert (REPOSITORY / "benchmarks" / f"{words[1]}.py").exists(), param.id
    found = [(words[0], param.id) for param in commands("python") for words in param.values if words]
    for word, where in found:
        if word.startswith(("examples/", "recipes/", "tools/", "benchmarks/", "packages/")):
            assert (REPOSITORY / word).exists(), where
    assert len(found) > 10
