"""Checks the language of docs, messages and docstrings; part of `./run lint`. Words and rules: CONTRIBUTING.md.

Checks all pages, and in all packages the messages of errors and logs, and the docstrings of modules, classes, functions
and fields. `python tools/language.py PATH...` checks others.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[1]
CHECKED = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "packages/*/README.md",
    "packages/*/CHANGELOG.md",
    "packages/*/src",
)

MAX_COLUMNS = 100
MAX_CELL_WORDS = 15
WORDS = re.compile(
    r"\b(whoever|nobody|anew|so many|so long as|drawn|errands?|judgement|verdicts?|is given up|was given up"
    r"|signs? of life|eight bits|first choices?|is to be|are to be|shall|lent|beneath"
    r"|goes? on|went on|(?:is|are) there already|is gone|of ours|without being told|takes? no)\b",
    re.IGNORECASE,
)
"""What the glossary replaces by the field's terms: sampled, request, reward, killed, heartbeat, fp8, argmax …"""
FRAGMENT = re.compile(r"Whether\b|So (many|much|long)\b|Of [^,:.]*[:.]|(?!`)\S+$")
"""Beginning of a docstring that does not stand alone in a tooltip, or its only word. `True if …` replaces `Whether`."""
LOGGERS = {"debug", "info", "warning", "error", "exception", "critical"}
MAX_PROSE_IN_TESTS = 60
"""Places where tests may match sentences: errors that a test raises itself, what torch says, a page's text."""
TEXT = re.compile(
    r"caplog|\.text\b|\bstr\(|std(err|out)|\.(err|out|failure|hint)\b|\blog\b|said|message|told|error|output"
)


def main(arguments: list[str]) -> int:
    """0 if nothing is found."""
    named = [Path(each) for each in arguments] or [each for glob in CHECKED for each in REPOSITORY.glob(glob)]
    files = [each for path in sorted(named) for each in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    found = [line for file in files for line in (page(file) if file.suffix == ".md" else source(file))]
    if not arguments:
        tests = [*REPOSITORY.glob("tests/**/*.py"), *REPOSITORY.glob("packages/*/tests/*.py")]
        prose = [line for file in sorted(tests) for line in prose_in(file)]
        found += prose if len(prose) > MAX_PROSE_IN_TESTS else []
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


def page(file: Path) -> Iterator[str]:
    """What is wrong in a page, as `file:line: reason`."""
    code = False
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        code ^= line.startswith("```")
        if code or line.startswith(("```", "    ")):
            continue
        where = f"{file}:{number}:"
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line)[1:-1]:
                if len(cell.split()) > MAX_CELL_WORDS:
                    yield f"{where} a table cell has {len(cell.split())} words, at most {MAX_CELL_WORDS}"
        elif len(line) > MAX_COLUMNS and " " in line.strip():
            yield f"{where} {len(line)} columns, at most {MAX_COLUMNS}"
        for word in WORDS.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)):
            yield f"{where} {word!r} is not a word of the glossary"


def source(file: Path) -> Iterator[str]:
    """The same for docstrings, and messages of errors and logs, in a module."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for line, text in docstrings(node):
            for word in WORDS.findall(re.sub(r"`[^`]*`", "", text)):
                yield f"{file}:{line}: {word!r} is not a word of the glossary"
            if FRAGMENT.match(text):
                yield f"{file}:{line}: the docstring does not stand alone: {text.splitlines()[0]!r}"
        called = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(called, ast.Call):
            continue
        logs = isinstance(called.func, ast.Attribute) and called.func.attr in LOGGERS
        if not isinstance(node, ast.Raise) and not logs:
            continue
        texts = [each.value for part in called.args for each in ast.walk(part) if isinstance(each, ast.Constant)]
        for word in WORDS.findall(" ".join(text for text in texts if isinstance(text, str))):
            yield f"{file}:{called.lineno}: {word!r} is not a word of the glossary"


def docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the docstring of a module, class or function, and of those of its fields and constants."""
    body = getattr(node, "body", None)
    for each in body if isinstance(body, list) else ():
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
            yield each.lineno, each.value.value


def prose_in(file: Path) -> Iterator[str]:
    """Places in a test file that match sentences instead of codes and facts."""
    from roll_testing.errors import is_prose

    text = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        patterns: list[ast.expr] = []
        if isinstance(node, ast.Call):
            patterns += [each.value for each in node.keywords if each.arg == "match"]
        elif isinstance(node, ast.Compare) and TEXT.search(ast.get_source_segment(text, node) or ""):
            patterns += [node.left, *node.comparators]
        literals = [each for part in patterns for each in ast.walk(part) if isinstance(each, ast.Constant)]
        if any(isinstance(each.value, str) and is_prose(each.value) for each in literals):
            yield f"{file}:{node.lineno}: matches prose: match the code and what it names (`roll_testing.errors`)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
