"""Checks the language of docs, messages, docstrings and names; part of `./run lint`. Words and rules: CONTRIBUTING.md.

Checks all pages, and in all packages the messages of errors and logs, the docstrings of modules, classes, functions and
fields, and the names of variables; in tests, the names of tests and the docstrings of modules.
`python tools/language.py PATH...` checks others.
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
MAX_TEST_NAME = 60
ODD_TEST_NAME = re.compile(r"test_(who|what|whoever|one|two|it|each|those|nobody|all)_")
"""Beginning of a test's name that does not name what the test is about."""
LOGGERS = {"debug", "info", "warning", "error", "exception", "critical"}
VAGUE_NAMES = {"each", "found", "given", "wanted", "kept", "whole", "own", "at"}
"""Names of variables that do not say what they hold."""
MAX_VAGUE_NAMES = {
    "roll-core": 4,
    "roll-testing": 2,
    "roll-tools": 2,
}
"""Largest number of such variables and parameters in the source of a package; 0 in other packages. Only lower it."""
MAX_PROSE_IN_TESTS = 60
"""Places where tests may match sentences: errors that a test raises itself, what torch says, a page's text."""
TEXT = re.compile(
    r"caplog|\.text\b|\bstr\(|std(err|out)|\.(err|out|failure|hint)\b|\blog\b|said|message|told|error|output"
)


def main(arguments: list[str]) -> int:
    """0 if nothing is found."""
    named = [Path(argument) for argument in arguments] or [path for glob in CHECKED for path in REPOSITORY.glob(glob)]
    files = [file for path in sorted(named) for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    problems = [line for file in files for line in (page(file) if file.suffix == ".md" else source(file))]
    if not arguments:
        tests = sorted([*REPOSITORY.glob("tests/**/*.py"), *REPOSITORY.glob("packages/*/tests/**/*.py")])
        problems += [line for file in tests for line in names_of_tests(file)]
        prose = [line for file in tests for line in prose_in(file)]
        problems += prose if len(prose) > MAX_PROSE_IN_TESTS else []
        for package in sorted((REPOSITORY / "packages").iterdir()):
            vague = [line for file in sorted(package.glob("src/**/*.py")) for line in vague_names(file)]
            if len(vague) > (most := MAX_VAGUE_NAMES.get(package.name, 0)):
                problems += [*vague, f"{package}: {len(vague)} variables with vague names, at most {most}"]
    sys.stdout.writelines(f"{line}\n" for line in problems)
    return 1 if problems else 0


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
        yield from docstring_problems(file, node)
        called = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(called, ast.Call):
            continue
        logs = isinstance(called.func, ast.Attribute) and called.func.attr in LOGGERS
        if not isinstance(node, ast.Raise) and not logs:
            continue
        texts = [leaf.value for part in called.args for leaf in ast.walk(part) if isinstance(leaf, ast.Constant)]
        for word in WORDS.findall(" ".join(text for text in texts if isinstance(text, str))):
            yield f"{file}:{called.lineno}: {word!r} is not a word of the glossary"


def docstring_problems(file: Path, node: ast.AST) -> Iterator[str]:
    """What is wrong in the docstrings of a module, class or function, as `file:line: reason`."""
    for line, text in docstrings(node):
        for word in WORDS.findall(re.sub(r"`[^`]*`", "", text)):
            yield f"{file}:{line}: {word!r} is not a word of the glossary"
        if FRAGMENT.match(text):
            yield f"{file}:{line}: the docstring does not stand alone: {text.splitlines()[0]!r}"


def docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the docstring of a module, class or function, and of those of its fields and constants."""
    body = getattr(node, "body", None)
    for statement in body if isinstance(body, list) else ():
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield statement.lineno, value.value


def names_of_tests(file: Path) -> Iterator[str]:
    """What is wrong in the names of tests and in the module docstring of a file of tests, as `file:line: reason`."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    yield from docstring_problems(file, module)
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
            continue
        where = f"{file}:{node.lineno}: {node.name}"
        if len(node.name) > MAX_TEST_NAME:
            yield f"{where} has {len(node.name)} characters, at most {MAX_TEST_NAME}"
        if ODD_TEST_NAME.match(node.name):
            yield f"{where} does not begin with what the test is about"
        for word in WORDS.findall(node.name.replace("_", " ")):
            yield f"{where}: {word!r} is not a word of the glossary"


def vague_names(file: Path) -> Iterator[str]:
    """Variables and parameters of a module whose name does not say what they hold, as `file:line: reason`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_NAMES:
            yield f"{file}:{node.lineno}: {node.id!r} does not say what the variable holds"
        elif isinstance(node, ast.arg) and node.arg in VAGUE_NAMES:
            yield f"{file}:{node.lineno}: {node.arg!r} does not say what the parameter holds"


def prose_in(file: Path) -> Iterator[str]:
    """Places in a test file that match sentences instead of codes and facts."""
    from roll_testing.errors import is_prose

    text = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            patterns = [keyword.value for keyword in node.keywords if keyword.arg == "match"]
        elif isinstance(node, ast.Compare):
            patterns = [node.left, *node.comparators]
        else:
            continue
        literals = [leaf.value for part in patterns for leaf in ast.walk(part) if isinstance(leaf, ast.Constant)]
        if not any(isinstance(literal, str) and is_prose(literal) for literal in literals):
            continue
        # `get_source_segment` splits the whole text, so it is the last check.
        if isinstance(node, ast.Call) or TEXT.search(ast.get_source_segment(text, node) or ""):
            yield f"{file}:{node.lineno}: matches prose: match the code and what it names (`roll_testing.errors`)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
