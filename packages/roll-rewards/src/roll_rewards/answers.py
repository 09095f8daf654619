r"""Rules that compare the response's answer with the row's: choices, texts, words in common.

The answer is what `answer_pattern` captures last, or else the content of the last `\boxed{…}` or `<answer>…</answer>`,
or what follows the last "answer is" or "answer:" up to the line's end. Otherwise it is the whole text. Reasoning does
not count: see `roll_core.data.reasoning`.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.data.reasoning import answer_of, opens_reasoning
from roll_core.errors import DataError
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.rollout import RewardRequest
    from roll_rewards.config import AnswerConfig

PHRASE = re.compile(r"\banswer[ \t*_]*(?:is\b|[:=])[\s*_:=]*(?=[^\n])", re.IGNORECASE)
CHOICE = re.compile(r"^(?:option |choice )?[(\[]?([A-Z])(?:[)\].:]+\s*(.*))?$", re.IGNORECASE | re.DOTALL)
# A letter and why; not "A, B" or "A cat".
REASONED_CHOICE = re.compile(
    r"^(?:option |choice )?[(\[]?([A-Z])[)\]]*"
    r"(?:[,;:](?!\s*(?:(?:or|and)\s+)?[(\[]?[A-Z]\b(?:\W*$|[,.)\]/]|\s+(?:or|and)\b))|\s*[-–—(]\s*"
    r"|\s+(?:because|since|as|for|due|given|which|that is|is|so)\b)(.*)$",
    re.IGNORECASE | re.DOTALL,
)
STYLED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
BARE_BOX = re.compile(r"\\boxed\s*([-+]?(?:\d[\d.,/]*\d|\d)|\s[A-Za-z]\b)")
ARTICLES = re.compile(r"\b(a|an|the)\b")
NUMBER_MARKS = re.compile(r"(?<!\w)-(?=\.?\d)|(?<=\d)[./](?=\d)|(?<![\w.])\.(?=\d)")
"""Signs and decimal points, which SQuAD removes as punctuation: -5 would equal 5, and 3.5 would equal 35."""
PUNCTUATION = str.maketrans("", "", string.punctuation)

NO_ANSWER = "no answer"
"""Detail `why` of a response that ends inside its reasoning, or has no answer in the required form."""


def with_boxes(text: str) -> str:
    r"""Write other boxes of TeX as `\boxed{…}`: `\fbox{…}`, `\framebox{…}`, `\boxed {…}`, and `\boxed 7`."""
    return BARE_BOX.sub(r"\\boxed{\1}", BOX.sub(r"\\boxed{", text))


def boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{…}`, with balanced braces; None without one."""
    text = with_boxes(text)
    last, opened = (-1, -1), list[int]()  # starts of contents; -1 for braces that are no box
    for brace in re.finditer(r"\\boxed\{|[{}]", text):
        if brace[0] != "}":
            opened.append(brace.end() if len(brace[0]) > 1 else -1)
        elif opened:
            last = max(last, (opened.pop(), brace.start()))
    return text[last[0] : last[1]] if last[0] >= 0 else None


def tagged(text: str) -> str | None:
    """Content of the last `<answer>…</answer>`; None without one."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + 8 : end] if start >= 0 else None


def find_answer(response: str, pattern: str = "", *, opened: bool = False) -> tuple[str, bool]:
    """The answer, and whether the response marked it. `opened` is that of `answer_of`.

    Empty if the response ends inside its reasoning.
    """
    text = answer_of(response, opened=opened) or ""
    if pattern:
        answers = [match.group(1) for match in re.finditer(pattern, text, re.DOTALL)]
        return (answers[-1].strip(), True) if answers and answers[-1] is not None else ("", False)
    if (inside := boxed(text)) is not None:
        return STYLED.sub(r"\1", inside).strip(), True
    if (inside := tagged(text)) is not None:
        return inside.strip(), True
    if phrases := list(PHRASE.finditer(text)):
        answer = text[phrases[-1].end() :].partition("\n")[0]
        return STYLED.sub(r"\1", answer).strip().rstrip("."), True
    return text.strip(), False


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and repeated blanks, as SQuAD compares answers (1606.05250)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def f1(answer: str, expected: str) -> float:
    """Harmonic mean of precision and recall of the words in common, `2 c / (n + m)` (SQuAD, 1606.05250).

    Of two answers without words, as of "a" and "the", it is 1: they are equal.
    """
    words, expected_words = normalised(answer).split(), normalised(expected).split()
    if not words or not expected_words:
        return float(words == expected_words)
    common = sum((Counter(words) & Counter(expected_words)).values())
    return 2 * common / (len(words) + len(expected_words))


def split_choice(text: str) -> tuple[str, str]:
    """Letter and text of a choice such as `B`, `(b)`, `**B**` or `B) Paris`; two empty texts if it is none.

    What follows a letter otherwise, as in `B, because …` or `B (Paris)`, is no text of the choice.
    """
    plain = text.replace("*", "").strip(" \t\n_$`\"'").rstrip(".")
    if match := CHOICE.match(plain):
        return match[1].upper(), (match[2] or "").strip()
    match = REASONED_CHOICE.match(plain)
    return (match[1].upper(), "") if match else ("", "")


def same(answer: str, expected: str) -> bool:
    """True if two answers are equal once normalised, and so are the signs and decimal points of their numbers.

    If nothing is left of the expected one, they must be equal as they are.
    """
    if not normalised(expected):
        return answer.strip() == expected.strip()
    return normalised(answer) == normalised(expected) and NUMBER_MARKS.findall(answer) == NUMBER_MARKS.findall(expected)


class AnswerReward(RewardFunction):
    """Base of rewards that compare an answer with alternatives. The best one counts."""

    config: AnswerConfig

    @override
    def score(self, request: RewardRequest) -> Reward:
        config = self.config
        truths = truths_of(request.metadata, config.ground_truth, f"sample {request.sample.id}")
        opened = opens_reasoning(request.prompt)
        answer, marked = find_answer(request.response, config.answer_pattern, opened=opened)
        detail: dict[str, float | str] = {"answer": answer[:200]}
        if not marked and (config.require_answer or not answer):
            return Reward(value=0.0, detail={**detail, "why": NO_ANSWER})
        return Reward(value=max(self.compare(answer, truth) for truth in truths), detail=detail)

    @override
    def unscorable(self, row: Mapping[str, Any]) -> str:
        try:
            for truth in truths_of(row, self.config.ground_truth, "the row"):
                self.compare("", truth)
        except DataError as problem:
            return str(problem)
        return ""

    def compare(self, answer: str, truth: str) -> float:
        """Value of an answer. Raises `DataError` for a ground truth that cannot be compared with."""
        raise NotImplementedError


class ExactMatch(AnswerReward):
    """1 if the normalised answer equals the normalised ground truth."""

    @override
    def compare(self, answer: str, truth: str) -> float:
        return float(same(answer, truth))


class F1(AnswerReward):
    """Words in common with the ground truth."""

    @override
    def compare(self, answer: str, truth: str) -> float:
        return f1(answer, truth)


class MultipleChoice(AnswerReward):
    """1 if the answer's letter is that of the ground truth."""

    @override
    def compare(self, answer: str, truth: str) -> float:
        expected, _ = split_choice(truth)
        if not expected:
            raise DataError(f"the ground truth {truth[:60]!r} names no choice, expected a letter such as B")
        return float(split_choice(answer)[0] == expected)


class CrossThinkQA(AnswerReward):
    """1 if the answer is the right choice, by its letter or its text, or else equals the ground truth.

    The rows of Nemotron-CrossThink (2504.13941) mix choices, for example `(B) Paris`, and short texts.
    """

    @override
    def compare(self, answer: str, truth: str) -> float:
        letter, text = split_choice(truth)
        if not letter:
            return float(same(answer, truth))
        chosen, rest = split_choice(answer)
        if chosen:  # a letter with the text of another choice is wrong
            return float(chosen == letter and (not rest or not text or same(rest, text)))
        return float(bool(text) and same(answer, text))


def truths_of(row: Mapping[str, Any], column: str, where: str) -> list[str]:
    """Right answers of a row, as texts. Raises `DataError` if there is none."""
    value: Any = row.get(column)
    value = value.tolist() if hasattr(value, "tolist") else value
    values = value if isinstance(value, (list, tuple)) else [value]
    usable = [value for value in values if isinstance(value, (str, int, float)) and not isinstance(value, bool)]
    texts = [_text(value) for value in usable if str(value).strip() and not _is_infinite(value)]
    if not values or len(texts) != len(values):
        known = ", ".join(sorted(row)) or "none"
        raise DataError(
            f"{where}: column {column!r} holds {str(value)[:100]!r}, expected a text, a number or a"
            f" list of them (the row's columns: {known})"
        )
    return texts


def _text(value: str | int | float) -> str:
    # repr() of a float may be 1e-05, which math-verify would read as a difference.
    return format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
