"""Reads the words of a shell script, with the variables and the integer arithmetic that it sets."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.errors import ConfigError, ConfigProblem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[@\]|:?-([^}]*))?\}|(\w+))")
_LIST = re.compile(r'"(\$\{\w+\[@\]\})"')
_ESCAPED = re.compile(r"\$'((?:[^'\\]|\\.)*)'")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
_ESCAPES = {"n": "\n", "t": "\t"}


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a script: quotes are removed, and known variables replaced."""

    text: str
    where: str
    """`file:line:column`."""
    command: int
    """Number of the command: the same for lines that end with a backslash and the next line."""

    def value(self, key: str, text: str) -> str:
        """Return `text`, a part of this word that is the value of `key`. Raises `ConfigError` for a variable in it."""
        if "$" in text or "`" in text:
            hint = "set the variable in the script, or write its value"
            problem = ConfigProblem(self.where, key, f"the value of {text} is unknown", hint, "ROLL-C024")
            raise ConfigError([problem])
        return text


def words_of(path: Path) -> Iterator[Word]:
    """Yield the words of a script, without comments. Raises `ConfigError` if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        problem = ConfigProblem(str(path), "", f"cannot be read: {error.strerror}", code="ROLL-C020")
        raise ConfigError([problem]) from error
    variables = {"HOME": os.path.expanduser("~")}
    array: tuple[str, list[str]] | None = None
    command = 0
    for number, line in enumerate(lines, 1):
        for text in _split(line, variables):
            assignment = _ASSIGNMENT.fullmatch(text)
            if array is None and assignment and assignment[2].startswith("("):
                array, text = (assignment[1], []), assignment[2][1:]
            elif array is None and assignment:
                variables[assignment[1]] = assignment[2]
            if array is not None:  # the words of a list, up to its parenthesis
                if text.removesuffix(")"):
                    array[1].append(text.removesuffix(")"))
                if text.endswith(")"):
                    variables[array[0]], array = shlex.join(array[1]), None
                continue
            column = line.find(text.partition("=")[0]) + 1
            yield Word(text, f"{path}:{number}:{max(column, 1)}", command)
        command += not line.rstrip().endswith("\\")


def _split(line: str, variables: Mapping[str, str]) -> list[str]:
    line = _ESCAPED.sub(lambda match: shlex.quote(re.sub(r"\\(.)", _unescaped, match[1])), line.strip())
    line = _ARITHMETIC.sub(lambda match: _calculated(match[0], match[1], variables), line).rstrip("\\")
    line = _substituted(_LIST.sub(r"\1", line), variables)
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quoted text of several lines
        return [word.strip("\"'") for word in line.split()]


def _unescaped(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[1], match[1])


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    """Replace the variables that are known; the others stay."""
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[3], match[2] or match[0]), text)


def _calculated(whole: str, text: str, variables: Mapping[str, str]) -> str:
    """Result of an arithmetic expression of integers; `whole` if it is another."""

    def result(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return int(_OPERATORS[type(node.op)](result(node.left), result(node.right)))
        return int(variables[node.id] if isinstance(node, ast.Name) else node.value)  # type: ignore[attr-defined]

    try:
        return str(result(ast.parse(_substituted(text, variables).strip(), mode="eval").body))
    except (SyntaxError, LookupError, AttributeError, TypeError, ValueError, ZeroDivisionError):
        return whole
