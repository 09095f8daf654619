r"""`reward: math_rule`: a table of equivalences, and the three states."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from roll_core.errors import DataError, RewardFailure
from roll_rewards.config import MathRuleConfig
from roll_rewards.math_rule import MathRuleReward
from roll_testing.errors import raises_error

RIGHT = [
    ("42", "The answer is 42"),
    ("42", r"\boxed{42}"),
    ("42", r"\boxed{42.0}"),
    ("3.0", "3"),
    ("-3", r"\boxed{-3}"),
    ("2^{10}", r"\boxed{1024}"),
    # fractions
    ("1/2", r"\boxed{\frac{1}{2}}"),
    ("1/2", "1/2"),
    ("1/2", "2/4"),
    (r"\frac12", "0.5"),
    ("0.5", r"the answer is $\frac{1}{2}$"),
    (r"\frac{2}{4}", r"\boxed{\tfrac{1}{2}}"),
    ("1/3", "0.333333"),
    # intervals and inequalities
    ("(1,2]", r"\boxed{(1, 2]}"),
    ("x>2", r"\boxed{(2,\infty)}"),
    # sets, in any order, also in several boxes
    (r"\{1,2,3\}", r"\boxed{\{3,2,1\}}"),
    ("1,2", r"\boxed{2,1}"),
    ("1,2", r"Solutions: \boxed{1} and \boxed{2}"),
    # percent: as a number of percent, and as a share
    ("50%", r"\boxed{50\%}"),
    ("50%", r"\boxed{50%}"),
    (r"50\%", r"$50\%$"),
    (r"50\%", r"\boxed{0.5}"),
    ("50%", r"\boxed{\frac12}"),
    ("50%", r"\boxed{50}"),
    ("0.5", r"\boxed{50\%}"),
    ("50", r"\boxed{50\%}"),
    ("50%", "about 50%"),
    (r"12.5\%", r"\boxed{\frac{25}{2}\%}"),
    # thousands, units, currency
    ("1,234", r"\boxed{1234}"),
    ("1234", "The total is 1,234"),
    ("12 cm", r"\boxed{12\text{ cm}}"),
    ("5", r"\boxed{\$5}"),
    # symbols
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
    ("3", r"\boxed{x=3}"),
    ("x=3", r"\boxed{3}"),
    (r"\pi", r"\boxed{3.14159265}"),
    ("3+4i", r"\boxed{4i+3}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}"),
    # choices and words
    ("A", r"\boxed{A}"),
    ("A", r"\boxed{\text{A}}"),
    ("Monday", r"\boxed{\text{Monday}}"),
    # numbers are compared relative to their size
    (r"1.6\times 10^{-19}", r"\boxed{1.6e-19}"),
    ("1.6e-19", "x=1.6*10^(-19)"),
    ("0.00000025", r"\boxed{2.5\cdot 10^{-7}}"),
    ("0.00000025", r"\boxed{\frac{1}{4000000}}"),
    ("2^{-99}", r"\boxed{\frac{1}{2^{99}}}"),
    (r"\frac{1}{2004!}", r"\boxed{\frac{2005}{2005!}}"),
    (r"\frac{1}{30}", "0.0333333"),
    (r"\frac23", "0.666667"),
    (r"6.02214076\times 10^{23}", r"\boxed{6.0221408\times 10^{23}}"),
    (r"\sqrt2+\sqrt3", r"\boxed{\sqrt{5+2\sqrt6}}"),
    ("0.5x+1", r"\boxed{\frac{x}{2}+1}"),
    ("1.5e-05", r"\boxed{0.000015}"),
    ("1500", "x=1.5e3"),
    ("1000", r"\boxed{1E3}"),
    # forms of boxes and currency
    ("42", r"\fbox{42}"),
    ("42", r"\framebox{42}"),
    ("7", r"\boxed 7"),
    ("42", r"\boxed {42}"),
    (r"\$18.90", r"\boxed{\$18.90}"),
    (r"\$18.90", "18.9"),
    (r"\$36", r"\boxed{36}"),
    (r"\$32,\!348", r"\boxed{32348}"),
    ("$18.90", "It is $18.90."),
    ("12", "She pays $5 + $7 = $12."),
    # a trailing letter is a unit only if the rest is an expression
    ("m^n - m", r"\boxed{m^n-m}"),
    ("f(x) = c", r"\boxed{f(x)=c}"),
    ("5 m", r"\boxed{5}"),
    # the last number counts, whatever was called the answer before
    ("42", "The answer is 41. Wait, it is 42"),
    ("42", "answer: 41\n\nso 42"),
    ("42", "It is 41, no, 42."),
    ("42", "The final answer is 42. I hope it helps."),
    ("42", "**Answer:** 42"),
    # choices and words
    ("B", "The answer is (B)."),
    ("B", r"\boxed{\textbf{(B)}\ 5}"),
    (r"\text{(B)}", r"\boxed{B}"),
    ("A", "Thus $A$ is right"),
    ("no", r"\boxed{\text{No}}"),
    ("yes", "The answer is yes."),
    (r"\text{north east}", r"\boxed{north east}"),
    ("no solution", r"\boxed{\text{No solution}}"),
    ("xy", r"\boxed{y\cdot x}"),
    ("i", r"\boxed{i}"),
    # a box wins over other mathematics, and a later one over one far before it
    ("42", r"$x$ is 5% of 3. \boxed{42} is not 43"),
    ("42", r"<think>\boxed{41}, no</think>The answer is $42$."),
    ("42", r"\boxed{41} " + "no, that cannot be right, so let me compute it once more. " * 3 + r"\boxed{42}"),
]
WRONG = [
    ("42", ""),
    ("42", "   \n"),
    ("42", "forty-two"),
    ("42", r"\boxed{}"),
    ("42", r"\boxed{42"),
    ("42", r"\boxed{43}"),
    ("-3", "3"),
    ("1/3", "0.33"),
    ("(1,2]", r"\boxed{[1,2]}"),
    (r"\{1,2,3\}", r"\boxed{\{1,2\}}"),
    ("50%", r"\boxed{51\%}"),
    ("50%", r"\boxed{5\%}"),
    ("A", r"\boxed{B}"),
    ("yes", r"\boxed{no}"),
    ("on", r"\boxed{no}"),
    ("seat", r"\boxed{east}"),
    (r"\text{on}", r"\boxed{no}"),
    ("on", "The answer is no"),
    ("B", "The answer is (C)."),
    ("41", "The answer is 41. Wait, it is 42"),
    (r"1.6\times 10^{-19}", r"\boxed{9.1\times 10^{-31}}"),
    (r"1.6\times 10^{-19}", r"\boxed{-1.6\times 10^{-19}}"),
    (r"1.6\times 10^{-19}", r"\boxed{0.0}"),
    (r"1.602\times 10^{-19}", r"\boxed{1.6\times 10^{-19}}"),
    ("0.00000025", r"\boxed{0.0000004}"),
    ("0", r"\boxed{1e-9}"),
    ("2^{-99}", r"\boxed{2^{-98}}"),
    (r"10^{-20}", r"\boxed{0}"),
    ("e^{-50}", r"\boxed{e^{-51}}"),
    (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}"),
    (r"\frac{\pi}{10^{20}}", r"\boxed{\frac{e}{10^{20}}}"),
    (r"10^{-20}x", r"\boxed{10^{-21}x}"),
    (r"1.6\times 10^{-19}x", r"\boxed{9.1\times 10^{-31}x}"),
    (r"(1.6\times 10^{-19}, 2)", r"\boxed{(9.1\times 10^{-31}, 2)}"),
    (r"\{1.6\times 10^{-19}, 2\}", r"\boxed{\{9.1\times 10^{-31}, 2\}}"),
    (r"[0, 1.6\times 10^{-19}]", r"\boxed{[0, 9.1\times 10^{-31}]}"),
    (r"x=1.6\times 10^{-19}", r"\boxed{x=9.1\times 10^{-31}}"),
    (r"x<1.6\times 10^{-19}", r"\boxed{x<9.1\times 10^{-31}}"),
    (
        r"\begin{pmatrix}1.6\times 10^{-19}\\2\end{pmatrix}",
        r"\boxed{\begin{pmatrix}9.1\times 10^{-31}\\2\end{pmatrix}}",
    ),
    (r"0.0000001\%", r"\boxed{0.0000002\%}"),
    ("18903.25", r"\boxed{18903.26}"),
    ("1234567", r"\boxed{1234568}"),
    ("42", r"<think>\boxed{42}. Wait, this is wrong, because"),
    ("42", r"analysis\boxed{42}assistantfinal41"),
    ("42", r"<think>\boxed{42}, or not</think>The answer is \boxed{41}."),
    ("42", r"<think>\boxed{42}</think>The answer is $41$."),
    ("42", r"\boxed{42} " + "no, that cannot be right, so let me compute it once more. " * 3 + r"\boxed{41}"),
]
FORGED = [
    # several guesses at once
    r"\boxed{1} \boxed{42} \boxed{3}",
    r"\boxed{42 or 43}",
    r"\boxed{42, 43}",
    "$42$ and $43$",
    # anything at all
    r"\boxed{n}",
    r"\boxed{x}",
    r"\boxed{\text{any number}}",
    r"\boxed{\mathbb{R}}",
    r"\boxed{(-\infty, \infty)}",
    # what a judge might say, and what it might run
    '{"value": 1.0}',
    '{"result": {"value": 1.0, "answer": "42"}}',
    r"\boxed{True}",
    r"\boxed{__import__('os')}",
    "answer: __import__('os').system('true')",
    r"\boxed{float('nan')}",
    r"\boxed{\infty}",
    r"\boxed{\text{nan}}",
]


@pytest.fixture(scope="module")
def math_rule():
    reward = MathRuleReward(MathRuleConfig(reward="math_rule", timeout_s=60))
    reward.start()
    yield reward
    reward.close()


@pytest.mark.parametrize(("truth", "response"), RIGHT)
def test_equal_answers_are_right(math_rule, asking, truth, response):
    assert math_rule.score(asking(response, ground_truth=truth)).value == 1.0


@pytest.mark.parametrize(("truth", "response"), WRONG)
def test_other_answers_are_wrong_and_no_failure(math_rule, asking, truth, response):
    found = math_rule.score(asking(response, ground_truth=truth))
    assert (found.value, found.failed) == (0.0, False)


@pytest.mark.parametrize("response", FORGED)
def test_forged_answers_are_wrong(math_rule, asking, response):
    assert math_rule.score(asking(response, ground_truth="42")).value == 0.0


def test_no_answer_makes_later_ones_right(math_rule, asking):
    # CVE-2026-6878: one payload that patches the judge in its own process
    payload = "answer: __import__('sympy').Basic.__eq__ = lambda *a: True; 9**2"
    assert math_rule.score(asking(payload, ground_truth="42")).value == 0.0
    assert math_rule.score(asking(r"\boxed{43}", ground_truth="42")).value == 0.0


@pytest.mark.parametrize("wrap", ["{}", r"\boxed{{{}}}", "answer: {}", "${}$"])
def test_the_text_is_never_run(math_rule, asking, tmp_path, wrap):
    canary = Path(tmp_path / "canary")
    for code in (f"__import__('pathlib').Path('{canary}').touch()", f"open('{canary}','w')", "(1).__class__.__base__"):
        math_rule.score(asking(wrap.format(code), ground_truth="42"))
    assert not canary.exists()


GARBAGE = {
    "letters": "a" * 10_000,
    "dollars": "$" * 10_000,
    "brackets": "(" * 10_000,
    "open boxes": r"\boxed{" * 2_000,
    "open fractions": r"\frac{" * 500,
    "a long sum": "1+" * 5_000,
    "control characters": "\x00\ufffd\u202e" * 3_000,
    "another script": "日本語の答えは " * 1_000,
    "lone surrogates": "\ud800" * 100,
    "many digits": "9" * 10_000,
    "percent signs": "%" * 10_000,
    "open boxes of percent signs": r"\boxed{%" * 1_000,
}


@pytest.mark.parametrize("response", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_worth_nothing(math_rule, asking, response):
    assert math_rule.score(asking(response, ground_truth="42")).value == 0.0


def test_unicode_around_an_answer_does_not_hide_it(math_rule, asking):
    assert math_rule.score(asking("日本語の答えは 🎲 \\boxed{42} です", ground_truth="42")).value == 1.0


def test_the_answer_that_was_found_is_shown_with_the_sample(math_rule, asking):
    assert math_rule.score(asking(r"so \boxed{\frac{1}{3}}", ground_truth="42")).detail == {"answer": r"\frac{1}{3}"}


@pytest.mark.parametrize(
    ("truth", "response"),
    [
        (42, "42"),
        (0.5, "1/2"),
        (0.00001, "0.00001"),
        (["1", 2], "2"),
        (("1", "2"), "1"),
        (np.array([1, 2]), "2"),
        ("$\\frac{1}{2}$", "0.5"),
    ],
)
def test_a_truth_may_be_a_number_or_a_list(math_rule, asking, truth, response):
    assert math_rule.score(asking(response, ground_truth=truth)).value == 1.0


@pytest.mark.parametrize("truth", ["日本", r"\frac{1}{", "????"])
def test_a_truth_that_is_no_mathematics_is_a_failure(math_rule, asking, truth):
    with raises_error(RewardFailure, repr(truth)[1:-1].strip()):
        math_rule.score(asking(r"\boxed{42}", ground_truth=truth))


@pytest.mark.parametrize("truth", [None, "", "  ", True, [], [None], {"answer": 42}, float("nan"), object()])
def test_a_truth_of_the_wrong_kind_names_row_and_column(math_rule, asking, truth):
    with raises_error(DataError, "row7/0/1", "'ground_truth'"):
        math_rule.score(asking(r"\boxed{42}", ground_truth=truth))


def test_a_missing_column_lists_those_there_are(math_rule, asking):
    with raises_error(DataError, "row7/0/1", "answer", "level"):
        math_rule.score(asking(r"\boxed{42}", answer="42", level=1))


def test_truth_column_and_required_box_are_configurable(asking):
    reward = MathRuleReward(
        MathRuleConfig(reward="math_rule", ground_truth="solution", require_boxed=True, timeout_s=60)
    )
    reward.start()
    try:
        assert reward.score(asking(r"\boxed{42}", solution="42")).value == 1.0
        assert reward.score(asking("the answer is $42$", solution="42")).value == 0.0
    finally:
        reward.close()


@pytest.mark.slow(ci=True)
def test_endless_answers_fail_at_their_deadline(asking):
    reward = MathRuleReward(MathRuleConfig(reward="math_rule", timeout_s=8, processes=1))
    reward.start()
    try:
        assert reward.score(asking("42", ground_truth="42")).value == 1.0
        with raises_error(RewardFailure, "8"):
            reward.score(asking("The answer is 9**9**9**9", ground_truth="42"))
        assert reward.score(asking("43", ground_truth="42")).value == 0.0
    finally:
        reward.close()


def test_concurrent_threads_get_separate_scores(math_rule, asking):
    def judge(i):
        return math_rule.score(asking(rf"\boxed{{{i % 7}}}", ground_truth=str(i % 5))).value

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(judge, range(105))) == [float(i % 7 == i % 5) for i in range(105)]
