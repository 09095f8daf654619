r"""Compares responses with the ground truth mathematically. Runs in child processes, which are killed if they hang.

The text is never evaluated as code: math-verify parses LaTeX by grammar, and plain expressions by a pattern that admits
only digits, operators and brackets. Arithmetic that does not terminate (9**9**9**9) remains possible; the timeout of
the child process bounds it.

math-verify's own timeouts are disabled: they are signals, work only on main threads, and do not interrupt C code. Its
comparison of numbers is replaced: it rounds to decimal places, so that all small numbers are equal.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped, unused-ignore]
from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader, parse, verify
from math_verify.grader import sympy_numeric_eq as compare_elements

from roll_core.data.reasoning import answer_of
from roll_core.errors import RewardFailure
from roll_rewards.answers import NO_ANSWER, STYLED, boxed, find_answer, same, split_choice, with_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# \boxed{…} takes precedence over phrases such as "the final answer is".
LATEX = LatexExtractionConfig(boxed_match_priority=0)
EXTRACTION = (LATEX, ExprExtractionConfig())
# A trailing letter is a unit, as in `5 m`, unless the rest is no expression, as in `m^n - m`.
WITHOUT_UNITS = (
    replace(LATEX, normalization_config=replace(LATEX.normalization_config, units=False)),
    ExprExtractionConfig(),
)
MATH_MARKS = ("$", "\\boxed", "\\(", "\\[")

# math-verify recognises a percentage only by a percent sign *after* the mathematics, `$50$%`; people and models write
# it inside. One level of nested braces is enough for a fraction.
PERCENT_INSIDE = (
    (re.compile(r"\\boxed\{((?:[^{}$\n]|\{[^{}]*\}){1,60}?)\s*\\?%\s*\}"), r"\\boxed{$\1$%}"),
    (re.compile(r"\$([^$\n]{1,60}?)\s*\\?%\s*\$"), r"$\1$%"),
)
CURRENCY = re.compile(r"(?<!\\)\\\$")
# math-verify takes what follows any "answer" before what follows it, but a later number corrects it.
ANSWER = re.compile(r"(final\s+)?\banswer\b", re.IGNORECASE)
EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d{1,3})(?!\w|\.\d)")
# Letters are a word, not a product of variables such as `xy`, if they have a vowel; `ab` and `cd` are products.
WORD = re.compile(r"(?=.*[eiou]|.*a.*[f-z]|.*[f-z].*a)[a-z]{2,}(?:[ -]+[a-z]+)*", re.IGNORECASE)
CHOICE = re.compile(r"\(?[A-J]\)?")


def prepare(options: Mapping[str, Any]) -> Callable[..., dict[str, Any]]:
    """Build the function that scores `(response, truths)`; a response that equals any of the truths gets 1.

    `opened` is that of `answer_of`.
    """
    grader.sympy_numeric_eq = same_number
    require_boxed: bool = options["require_boxed"]
    float_rounding: int = options["float_rounding"]

    def score(response: str, truths: list[str], opened: bool = False) -> dict[str, Any]:
        expected = [(truth, read_truth(truth)) for truth in truths]
        text = answer_of(response, opened=opened)  # a box in the reasoning is not the answer
        if text is None or (require_boxed and not boxed(text)):
            return {"value": 0.0, "answer": "", "why": NO_ANSWER}
        answers = _parse(text)
        extracted = next((answer for answer in answers if isinstance(answer, str)), "")
        marked, is_marked = find_answer(text)
        right = any(
            same_text(marked if is_marked or not extracted else extracted, truth)
            if parsed is None
            else verify(parsed, answers, float_rounding=float_rounding, timeout_seconds=None)
            for truth, parsed in expected
        )
        return {"value": float(right), "answer": extracted[:200]}

    return score


@lru_cache(maxsize=1024)
def read_truth(truth: str) -> list[Any] | None:
    """Parse the ground truth into expressions; None for a text. Raises `RewardFailure` if it is neither."""
    if is_text(truth):
        return None
    text = CURRENCY.sub("", truth)
    marked = text if any(mark in text for mark in MATH_MARKS) else f"${text}$"
    parsed = _parse(marked) if truth.strip() else []
    if not _has_expression(parsed):
        raise RewardFailure(
            f"the ground truth {truth[:200]!r} is not a mathematical expression that can be compared with"
        )
    return parsed


def _parse(text: str) -> list[Any]:
    """Parse expressions in the text; the list also has the text of the first. Empty if there are none."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # otherwise each process warns that timeouts are off
    text = with_boxes(CURRENCY.sub("", text))
    text = ANSWER.sub(lambda match: match[0] if match[1] else "result", text)
    text = EXPONENT.sub(lambda match: format(Decimal(match[0]), "f"), text)
    for pattern, replacement in PERCENT_INSIDE:
        text = pattern.sub(replacement, text)
    parsed = list(parse(text, EXTRACTION, parsing_timeout=None))
    if parsed and not _has_expression(parsed):
        parsed = list(parse(text, WITHOUT_UNITS, parsing_timeout=None))
    return parsed


def _has_expression(parsed: list[Any]) -> bool:
    return any(not isinstance(expression, str) for expression in parsed)


# -- words -------------------------------------------------------------------------------------------------------------


def is_text(truth: str) -> bool:
    """True for a word or a choice. As products of letters, `on` would equal `no`."""
    plain = _plain(truth)
    return WORD.fullmatch(plain) is not None or CHOICE.fullmatch(plain) is not None


def same_text(answer: str, truth: str) -> bool:
    """True if an answer is this word or choice."""
    given_answer, expected = _plain(answer), _plain(truth)
    if CHOICE.fullmatch(expected):
        return split_choice(given_answer)[0] == split_choice(expected)[0]
    return same(given_answer, expected)


def _plain(text: str) -> str:
    text = text.strip().removesuffix(".").strip("$ ")
    return STYLED.sub(r"\1", text.removeprefix("\\(").removesuffix("\\)")).strip()


# -- numbers -----------------------------------------------------------------------------------------------------------


def same_number(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    """True if two expressions are equal: exactly, or to `float_rounding` digits if one has a decimal fraction.

    The digits are decimal places of numbers from 1 on, of the first factor in scientific notation, and significant
    digits below 1.
    """
    if isinstance(a, (sympy.MatrixBase, sympy.MatrixExpr)) or isinstance(b, (sympy.MatrixBase, sympy.MatrixExpr)):
        return bool(compare_elements(a, b, float_rounding, numeric_precision))  # calls this function for each
    if grader.is_atomic_or_pct_atomic(a, sympy.Integer) and grader.is_atomic_or_pct_atomic(b, sympy.Integer):
        return bool(grader.get_pct_val(a, a) == grader.get_pct_val(b, b))  # 9% equals 9
    is_scientific = any(_is_power_of_ten(part) for number in (a, b) for part in sympy.preorder_traversal(number))
    try:
        return _same_value(a.doit(), b.doit(), float_rounding, is_scientific)
    except (ArithmeticError, AttributeError, TypeError, ValueError):  # not numbers
        return False


def _is_power_of_ten(part: Any) -> bool:
    return isinstance(part, sympy.Pow) and part.base == 10 and part.exp.is_Integer


def _same_value(a: Any, b: Any, float_rounding: int, is_scientific: bool) -> bool:
    if a.is_Rational and b.is_Rational:
        return bool(a == b)
    is_decimal = a.has(sympy.Float) or b.has(sympy.Float)
    if a.free_symbols or b.free_symbols:
        if not is_decimal:
            return False  # math-verify simplifies the difference next
        left, right = (expression.expand().as_coefficients_dict() for expression in (a, b))
        return left.keys() == right.keys() and all(
            _same_value(left[term], right[term], float_rounding, is_scientific) for term in left
        )
    size = max(abs(a.evalf(DIGITS)), abs(b.evalf(DIGITS)))
    if not size.is_finite:
        return False
    difference = abs(a.evalf(DIGITS) - b.evalf(DIGITS))
    if not is_decimal:
        return bool(difference <= size * sympy.Float(10) ** -EXACT_DIGITS)
    unit = sympy.Integer(1)
    if size and (size < 1 or is_scientific):
        unit = sympy.Integer(10) ** (sympy.floor(sympy.log(size, 10).evalf(DIGITS)) + int(bool(size < 1)))
    return bool(difference <= unit * sympy.Rational(1, 2 * 10**float_rounding) * HALF_UNIT)


DIGITS, EXACT_DIGITS = 60, 50
"""Digits of exact numbers that are evaluated, such as roots, and digits that must be equal."""
HALF_UNIT = 1 + sympy.Rational(1, 10**6)
"""A number that is rounded has an error of half a unit of its last digit; the rest is that of floats."""
