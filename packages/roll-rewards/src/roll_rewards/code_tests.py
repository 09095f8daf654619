"""Tests of a row for the reward `code`, and how outputs compare. Everything here is plain data in the worker.

Data sets write tests in these forms, also as the JSON text of one:

    {"inputs": ["1 2\n", ...], "outputs": ["3\n", ...]}                        APPS, TACO, CodeContests
    {"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}           their call-based problems
    [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}, ...]            LiveCodeBench
    [{"input": "1\n2", "output": "3", "testtype": "functional"}, ...]          arguments as one JSON value per line
    ["assert add(1, 2) == 3", ...]                                             MBPP
    [{"assert_code": "def test_add(): ..."}, ...]                              ROLL
    "def check(candidate): ..."                                                HumanEval, with the column fn_name
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from roll_core.data.reasoning import answer_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FENCE = re.compile(r"((?:[ \t>]|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t]))*)(```+(?=[^`]*$)|~~~+)[ \t]*\{?\.?([\w+-]*)")
"""Beginning of a fence: what stands before it (blanks, marks of lists and quotes), its marks, its language."""
PYTHON = frozenset({"python", "python3", "python2", "py", "py3"})
TAB = 4
LONG_NUMBER = re.compile(r"\d{4000,}")
INPUT_KEYS, OUTPUT_KEYS = ("input", "stdin"), ("output", "expected_stdout", "expected_output")


@dataclass(frozen=True, slots=True)
class StdinTest:
    """A program that reads standard input and writes the expected text to standard output."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """A call and its expected values, any of which is right."""

    function: str
    arguments: tuple[Any, ...]
    expected: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CodeTest:
    """Test code that calls the program, and the name of the function that it calls `candidate`."""

    source: str
    entry: str


Test = StdinTest | CallTest | CodeTest


def last_program(response: str, *, require_code_block: bool = True, opened: bool = False) -> str | None:
    """The last fenced block of Python, or the last one without a language if none is of Python; None without one.

    Reasoning does not count; `opened` is that of `answer_of`.
    """
    text = answer_of(response, opened=opened)
    if text is None:
        return None
    blocks = list(_blocks(text.replace("\r\n", "\n")))
    programs = [block for block, language in blocks if language in PYTHON]
    programs = programs or [block for block, language in blocks if not language]
    return programs[-1] if programs else None if require_code_block else text


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Contents and language, in lower case, of each fenced block that is closed."""
    lines = iter(text.split("\n"))
    for line in lines:
        fence = FENCE.match(line) if "```" in line or "~~~" in line else None
        if fence is None:
            continue
        column, marks, is_quoted = len(fence[1].expandtabs(TAB)), fence[2], ">" in fence[1]
        block: list[str] = []
        for inner in lines:
            rest = inner.lstrip(" \t>")
            # A closing fence that is indented more than the block is part of it, for example of a docstring.
            if rest.startswith(marks) and not rest.strip(f"{marks[0]} \t") and len(inner) - len(rest) < column + TAB:
                yield "".join(f"{_dedented(line, column, is_quoted)}\n" for line in block), fence[3].lower()
                break
            block.append(inner)


def _dedented(line: str, column: int, is_quoted: bool) -> str:
    """A line of a block without the indentation of its fence, as CommonMark defines it: at most as many columns."""
    if is_quoted:
        before, mark, rest = line.partition(">")
        line, column = (rest, column - len(before) - 1) if mark and not before.strip() else (line, column)
        return _dedented(line, column, is_quoted=False)
    width = 0
    for index, character in enumerate(line):
        if width >= column or character not in " \t":
            return " " * max(width - column, 0) + line[index:]
        width += TAB - width % TAB if character == "\t" else 1
    return ""


def read_tests(value: Any, fn_name: str = "") -> list[Test]:
    """Tests of a row. Raises `ValueError` with what is wrong."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str):
        try:
            value = _json(value)
        except ValueError:
            value = [value]  # test code
    if isinstance(value, str):
        value = [value]
    if isinstance(value, dict):
        value = _columns(value, fn_name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{_short(value)}, expected a list of tests that is not empty")
    tests = [entry if isinstance(entry, (CallTest, StdinTest)) else _test(entry, fn_name) for entry in value]
    if not any(_compares(test) for test in tests):
        raise ValueError("every expected output is empty, so a program that does nothing would pass")
    return tests


def syntax_problem(test: Test) -> str:
    """Why test code is no Python; empty if it is, and for other tests."""
    if not isinstance(test, CodeTest):
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            ast.parse(LONG_NUMBER.sub("1", test.source))  # the boxes have no limit of digits, this process has
    except (SyntaxError, ValueError) as error:  # ValueError: a null character
        return f"test code {test.source!r:.60}: {error}"
    return ""


def _columns(value: Mapping[str, Any], fn_name: str) -> list[Any]:
    if "inputs" not in value:
        return [value]
    inputs, outputs, function = value["inputs"], value.get("outputs"), value.get("fn_name") or fn_name
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs, expected two lists of equal length")
    pairs = zip(inputs, outputs, strict=True)
    if not function:
        return [StdinTest(_text(stdin), _text(stdout)) for stdin, stdout in pairs]
    return [_call(function, arguments, output) for arguments, output in pairs]


def _test(value: Any, fn_name: str) -> Test:
    if isinstance(value, str) and value.strip():
        return CodeTest(value, fn_name)
    if not isinstance(value, dict):
        raise ValueError(f"a test is {_short(value)}, expected test code, or a mapping with input and output")
    if "assert_code" in value:
        return _test(str(value["assert_code"]), str(value.get("entry_point") or fn_name))
    stdin = next((value[key] for key in INPUT_KEYS if key in value), None)
    output = next((value[key] for key in OUTPUT_KEYS if key in value), None)
    if stdin is None or output is None:
        raise ValueError(f"a test has the keys {sorted(map(str, value))}, expected input and output, or assert_code")
    function = str(value.get("fn_name") or fn_name)
    if value.get("testtype", "functional" if function else "stdin") == "stdin":
        return StdinTest(_text(stdin), _text(output))
    if not function:
        raise ValueError("a functional test without the name of its function: set it in the column fn_name")
    return _call(function, stdin, output)


def _call(function: str, arguments: Any, output: Any) -> CallTest:
    if isinstance(arguments, str):
        arguments = [_json(line) for line in arguments.splitlines() if line.strip()]
        output = _json(output) if isinstance(output, str) else output
        return CallTest(function, tuple(arguments), (output,))
    if not isinstance(arguments, list):
        raise ValueError(f"arguments of {function} are {_short(arguments)}, expected a list")
    # APPS wraps the value of many problems into a list of one.
    wrapped = isinstance(output, list) and len(output) == 1
    return CallTest(function, tuple(arguments), (output, output[0]) if wrapped else (output,))


def _compares(test: Test) -> bool:
    return not isinstance(test, StdinTest) or bool(test.expected.strip())


def _text(value: Any) -> str:
    if isinstance(value, list):  # APPS has some as lists of lines
        return "\n".join(_text(line) for line in value)
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"an input or output is {_short(value)}, expected text")
    return str(value if isinstance(value, (str, float, bool)) else Decimal(value))  # str() of integers has a limit


def _json(text: str) -> Any:
    """Value of a JSON text. Its integers may have more than the 4,300 digits that `int` reads."""
    return json.loads(text, parse_int=lambda digits: int(digits if len(digits) < 4000 else Decimal(digits)))


def _short(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"


# -- comparison --------------------------------------------------------------------------------------------------------


def same_text(output: str, expected: str, tolerance: float = 0.0) -> bool:
    """True if the lines are equal without surrounding blanks, or their words are equal, numbers as decimals."""
    lines, expected_lines = ([line.strip() for line in text.strip().splitlines()] for text in (output, expected))
    if lines == expected_lines:
        return True
    if len(lines) != len(expected_lines):
        return False
    return all(_same_line(a, b, tolerance) for a, b in zip(lines, expected_lines, strict=True))


def _same_line(line: str, expected: str, tolerance: float) -> bool:
    words, expected_words = line.split(), expected.split()
    return len(words) == len(expected_words) and all(
        a == b or _same_number(a, b, tolerance) for a, b in zip(words, expected_words, strict=True)
    )


def _same_number(word: str, expected: str, tolerance: float) -> bool:
    if "_" in word + expected:  # a mark that `Decimal` ignores
        return False
    try:
        a, b = Decimal(word), Decimal(expected)
    except InvalidOperation:
        return False
    if not (a.is_finite() and b.is_finite()):
        return False
    if not tolerance:
        return a == b
    if max(a.adjusted(), b.adjusted()) > 400:  # beyond floats; the difference of such numbers is slow
        return a == b
    return abs(a - b) <= Decimal(tolerance) * max(Decimal(1), abs(b))


def same_value(result: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """True if a returned value is the expected JSON value. Tuples equal lists, and keys of objects are texts."""
    if isinstance(expected, bool) or isinstance(result, bool):
        return result is expected
    if isinstance(expected, (int, float)):
        if not isinstance(result, (int, float)):
            return False
        close = isinstance(result, float) or isinstance(expected, float)
        return result == expected or bool(
            tolerance and close and abs(result - expected) <= tolerance * max(1.0, abs(expected))
        )
    if isinstance(expected, list):
        if not isinstance(result, (list, tuple)) or len(result) != len(expected):
            return False
        return all(same_value(a, b, tolerance) for a, b in zip(result, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(result, dict) or len(result) != len(expected):
            return False
        by_text = {str(key): value for key, value in result.items()}
        return all(key in by_text and same_value(by_text[key], value, tolerance) for key, value in expected.items())
    return type(result) is type(expected) and bool(result == expected)
