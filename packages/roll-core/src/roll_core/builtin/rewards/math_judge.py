r"""Is this answer the right one, mathematically? Runs in a judging process, where it may hang, and be killed.

The text is never evaluated as code: math-verify parses LaTeX by grammar, and plain expressions by a pattern that lets
only digits, operators and brackets through. What remains is arithmetic that does not end (9**9**9**9), which is what
the deadline of the process is for.

math-verify's own timeouts are off: they are signals, work on main threads only, and do not interrupt C code.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from roll_core.errors import RewardFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# \boxed{…} wins over phrases such as "the final answer is".
EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
MATH_MARKS = ("$", "\\boxed", "\\(", "\\[")

# math-verify knows a percentage only by a percent sign *after* the mathematics, `$50$%`; people and models write it
# inside. One level of braces inside is enough for a fraction.
PERCENT_INSIDE = (
    (re.compile(r"\\boxed\{((?:[^{}$\n]|\{[^{}]*\}){1,60}?)\s*\\?%\s*\}"), r"\\boxed{$\1$%}"),
    (re.compile(r"\$([^$\n]{1,60}?)\s*\\?%\s*\$"), r"$\1$%"),
)


def prepare(options: Mapping[str, Any]) -> Callable[..., dict[str, Any]]:
    """A judge of `(response, truths)`."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # one warning that timeouts are off, per process
    require_boxed: bool = options["require_boxed"]
    float_rounding: int = options["float_rounding"]

    def judge(response: str, truths: list[str]) -> dict[str, Any]:
        expected = [parse_truth(truth) for truth in truths]
        if require_boxed and "\\boxed" not in response:
            return {"value": 0.0, "answer": ""}
        answers = _parse(response)
        right = any(verify(each, answers, float_rounding=float_rounding, timeout_seconds=None) for each in expected)
        return {"value": float(right), "answer": next((each[:200] for each in answers if isinstance(each, str)), "")}

    return judge


@lru_cache(maxsize=1024)
def parse_truth(truth: str) -> list[Any]:
    """The ground truth as expressions. Raises `RewardFailure` if it is none: no answer could be judged by it."""
    marked = truth if any(mark in truth for mark in MATH_MARKS) else f"${truth}$"
    found = _parse(marked) if truth.strip() else []
    if not any(not isinstance(each, str) for each in found):
        raise RewardFailure(
            f"the ground truth {truth[:200]!r} is not a mathematical expression that can be compared with"
        )
    return found


def _parse(text: str) -> list[Any]:
    """Expressions found in the text, and the text of the first; nothing if there are none."""
    for pattern, replacement in PERCENT_INSIDE:
        text = pattern.sub(replacement, text)
    return list(parse(text, EXTRACTION, parsing_timeout=None))
