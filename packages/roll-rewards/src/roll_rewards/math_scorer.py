r"""Compares responses with the ground truth mathematically. Runs in child processes, which are killed if they hang.

The text is never evaluated as code: math-verify parses LaTeX by grammar, and plain expressions by a pattern that admits
only digits, operators and brackets. Arithmetic that does not terminate (9**9**9**9) remains possible; the timeout of
the child process bounds it.

math-verify's own timeouts are disabled: they are signals, work only on main threads, and do not interrupt C code.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from roll_core.data.reasoning import answer_of
from roll_core.errors import RewardFailure
from roll_rewards.answers import NO_ANSWER, boxed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# \boxed{…} takes precedence over phrases such as "the final answer is".
EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
MATH_MARKS = ("$", "\\boxed", "\\(", "\\[")

# math-verify recognises a percentage only by a percent sign *after* the mathematics, `$50$%`; people and models write
# it inside. One level of nested braces is enough for a fraction.
PERCENT_INSIDE = (
    (re.compile(r"\\boxed\{((?:[^{}$\n]|\{[^{}]*\}){1,60}?)\s*\\?%\s*\}"), r"\\boxed{$\1$%}"),
    (re.compile(r"\$([^$\n]{1,60}?)\s*\\?%\s*\$"), r"$\1$%"),
)


def prepare(options: Mapping[str, Any]) -> Callable[..., dict[str, Any]]:
    """Build the function that scores `(response, truths)`; a response that equals any of the truths gets 1.

    `opened` is that of `answer_of`.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # otherwise each process warns that timeouts are off
    require_boxed: bool = options["require_boxed"]
    float_rounding: int = options["float_rounding"]

    def score(response: str, truths: list[str], opened: bool = False) -> dict[str, Any]:
        expected = [parse_truth(truth) for truth in truths]
        text = answer_of(response, opened=opened)  # a box in the reasoning is not the answer
        if text is None or (require_boxed and not boxed(text)):
            return {"value": 0.0, "answer": "", "why": NO_ANSWER}
        answers = _parse(text)
        right = any(verify(each, answers, float_rounding=float_rounding, timeout_seconds=None) for each in expected)
        return {"value": float(right), "answer": next((each[:200] for each in answers if isinstance(each, str)), "")}

    return score


@lru_cache(maxsize=1024)
def parse_truth(truth: str) -> list[Any]:
    """Parse the ground truth into expressions. Raises `RewardFailure` if it contains none."""
    marked = truth if any(mark in truth for mark in MATH_MARKS) else f"${truth}$"
    found = _parse(marked) if truth.strip() else []
    if not any(not isinstance(each, str) for each in found):
        raise RewardFailure(
            f"the ground truth {truth[:200]!r} is not a mathematical expression that can be compared with"
        )
    return found


def _parse(text: str) -> list[Any]:
    """Parse expressions in the text; the list also has the text of the first. Empty if there are none."""
    for pattern, replacement in PERCENT_INSIDE:
        text = pattern.sub(replacement, text)
    return list(parse(text, EXTRACTION, parsing_timeout=None))
