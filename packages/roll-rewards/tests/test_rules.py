"""Rules: answers, formats, penalties. Each has a value that is computed by hand, and hostile responses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from roll_core.errors import DataError
from roll_rewards import config
from roll_rewards.answers import F1, CrossThinkQA, ExactMatch, MultipleChoice, boxed, f1, find_answer, split_choice
from roll_rewards.rules import Format, LengthPenalty, RepetitionPenalty, length_penalty, repeated_share

ANSWERS = {
    "exact_match": (ExactMatch, config.ExactMatchConfig),
    "f1": (F1, config.F1Config),
    "multiple_choice": (MultipleChoice, config.MultipleChoiceConfig),
    "crossthink_qa": (CrossThinkQA, config.CrossThinkQAConfig),
}
HOSTILE = ["", "\x00", "\ud800", "(" * 100_000, "\\boxed{" * 1000, "a " * 500_000, "٣", "nan", "```" * 9]


@pytest.fixture
def value(reward, requesting):
    def score(name, response, truth, **options):
        made = reward(*ANSWERS[name], name, **options)
        return made.score(requesting(response, ground_truth=truth)).value

    return score


def test_a_ground_truth_may_be_in_a_column_with_a_mapping(reward, requesting):
    name = "reward_model.ground_truth"
    made = reward(*ANSWERS["exact_match"], "exact_match", ground_truth=name)
    row = {"style": "rule", "ground_truth": "2"}
    assert made.score(requesting("answer: 2", reward_model=row)).value == 1
    assert made.score(requesting("answer: 2", reward_model=row, **{name: "3"})).value == 0
    with pytest.raises(DataError):
        made.score(requesting("answer: 2", reward_model={"style": "rule"}))


def test_the_last_balanced_box_is_the_answer():
    assert boxed(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1} then \boxed{2") == "1"
    assert boxed("no box") is None


def test_answers_are_found_by_box_tag_or_phrase():
    assert find_answer(r"so \boxed{\text{B}}") == ("B", True)
    assert find_answer("<answer> 7 </answer>") == ("7", True)
    assert find_answer("The answer is: Paris.\n") == ("Paris", True)
    assert find_answer("**Answer:**\nB\n\nI hope this answers it!") == ("B", True)
    assert find_answer("My answers are many") == ("My answers are many", False)
    assert find_answer("Paris") == ("Paris", False)
    assert find_answer(r"<think>\boxed{1}</think>two") == ("two", False)
    assert find_answer("#### 1\n#### 42", r"#### (\S+)") == ("42", True)
    assert find_answer("no mark", r"#### (\S+)") == ("", False)


def test_f1_by_hand():
    # "cat sat on mat" (articles dropped, 4 words) and "cat is on mat" (4): 3 in common.
    assert f1("The cat sat on the mat.", "a cat is on a mat") == pytest.approx(2 * 3 / 8)
    # Repeated words count as often as both have them: 1 of 3 and 1.
    assert f1("no no no", "no") == pytest.approx(2 * 1 / 4)
    assert f1("", "x") == 0.0
    assert f1("the", "A") == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B", ("B", "")),
        ("(b)", ("B", "")),
        ("**C**", ("C", "")),
        ("B) Paris", ("B", "Paris")),
        ("D. ", ("D", "")),
        ("option A", ("A", "")),
        ("A cat", ("", "")),
        ("Paris", ("", "")),
        ("", ("", "")),
        ("AB", ("", "")),
        ('"[b]"', ("B", "")),
        ("B, because it is", ("B", "")),
        ("B (Paris)", ("B", "")),
        ("B - Paris", ("B", "")),
        ("**B**, since", ("B", "")),
        ("A because", ("A", "")),
        ("A, B", ("", "")),
        ("A, or B", ("", "")),
        ("A or B", ("", "")),
        ("either A or B", ("", "")),
    ],
)
def test_choices_are_a_letter_and_perhaps_its_text(text, expected):
    assert split_choice(text) == expected


@pytest.mark.parametrize(
    ("name", "response", "truth", "expected"),
    [
        ("exact_match", "The answer is The Eiffel  Tower!", "eiffel tower", 1.0),
        ("exact_match", "Eiffel", "eiffel tower", 0.0),
        ("exact_match", "42", ["41", 42], 1.0),
        ("exact_match", "", "x", 0.0),
        ("exact_match", "", "!", 0.0),
        ("exact_match", "!", "!", 1.0),
        ("exact_match", "The answer is -5", "5", 0.0),
        ("exact_match", "The answer is 3.5.", "35", 0.0),
        ("exact_match", "The answer is 3.5.", "3.5", 1.0),
        ("exact_match", "The answer is 1,234", "1234", 1.0),
        ("exact_match", "a well-known one", "wellknown one", 1.0),
        ("crossthink_qa", r"\boxed{1/2}", "12", 0.0),
        ("multiple_choice", r"\boxed{\textbf{B}}", "B", 1.0),
        ("multiple_choice", "**Answer:**\nB\n\nI hope this answers it!", "B", 1.0),
        ("f1", "<answer>big red dog</answer>", ["red dog", "cat"], 0.8),
        ("multiple_choice", r"\boxed{B}", "B", 1.0),
        ("multiple_choice", r"\boxed{(C)}", "B", 0.0),
        ("multiple_choice", "The answer is (b).", "B", 1.0),
        ("multiple_choice", "I do not know", "B", 0.0),
        ("multiple_choice", "The answer is B, because A is wrong", "B", 1.0),
        ("multiple_choice", "Answer: B (Paris)", "B", 1.0),
        ("multiple_choice", "Answer: B - Paris", "B", 1.0),
        ("multiple_choice", "**Answer:** **B** – Paris", "B", 1.0),
        ("multiple_choice", r"the answer is $\text{D}$", "D", 1.0),
        ("multiple_choice", r"the answer is \textbf{(D)}.", "D", 1.0),
        ("multiple_choice", "The answer is either A or B. The answer is B", "B", 1.0),
        ("multiple_choice", "The answer is either A or B.", "A", 0.0),
        ("multiple_choice", "The answer is A, B or C.", "A", 0.0),
        ("multiple_choice", "The answer is C since B is not", "B", 0.0),
        ("multiple_choice", "The answer is A cat", "A", 0.0),
        ("exact_match", "The answer is Rome. No, the answer is Paris.", "Paris", 1.0),
        ("crossthink_qa", "The answer is B, because", "(B) Paris", 1.0),
        ("crossthink_qa", r"\boxed{B}", "(B) Paris", 1.0),
        ("crossthink_qa", r"\boxed{Paris}", "(B) Paris", 1.0),
        ("crossthink_qa", r"\boxed{B) Paris}", "B) Paris", 1.0),
        ("crossthink_qa", r"\boxed{B) London}", "(B) Paris", 0.0),
        ("crossthink_qa", r"\boxed{A}", "(B) Paris", 0.0),
        ("crossthink_qa", r"\boxed{the  paris}", "Paris", 1.0),
        ("crossthink_qa", "", "(B) Paris", 0.0),
    ],
)
def test_answers_score(value, name, response, truth, expected):
    assert value(name, response, truth) == pytest.approx(expected)


def test_an_unmarked_answer_gets_0_where_a_mark_is_required(value):
    assert value("exact_match", "Paris", "Paris", require_answer=True) == 0.0
    assert value("exact_match", r"\boxed{Paris}", "Paris", require_answer=True) == 1.0


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("truth", [None, "", " ", math.nan, [], [None], True, {}, ["x", math.inf]])
def test_rows_without_a_usable_ground_truth_are_failures(value, name, truth):
    with pytest.raises(DataError):
        value(name, "x", truth)


def test_a_ground_truth_without_a_choice_is_a_failure(value):
    with pytest.raises(DataError):
        value("multiple_choice", "B", "Paris")


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("response", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_responses_get_no_reward(value, name, response):
    assert value(name, response, "B") == 0.0


def test_arrays_are_alternatives(value):
    assert value("exact_match", "b", np.array(["a", "b"])) == 1.0


# -- format, length, repetitions ---------------------------------------------------------------------------------------


def test_a_format_matches_the_whole_response_or_a_part(reward, requesting):
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    full = reward(Format, config.FormatConfig, "format", format_pattern=pattern)
    part = reward(Format, config.FormatConfig, "format", format_pattern=pattern, match="search")
    text = "<think>a\nb</think>\n<answer>c</answer>"
    assert [each.score(requesting(text)).value for each in (full, part)] == [1.0, 1.0]
    assert [each.score(requesting(text + "!")).value for each in (full, part)] == [0.0, 1.0]
    assert [full.score(requesting(each)).value for each in HOSTILE] == [0.0] * len(HOSTILE)


def test_the_length_penalty_is_linear_between_its_lengths():
    assert [length_penalty(n, 100, 300) for n in (0, 100, 150, 300, 900)] == [0.0, 0.0, -0.25, -1.0, -1.0]


def test_the_length_penalty_counts_tokens(reward, requesting):
    made = reward(LengthPenalty, config.LengthPenaltyConfig, "length_penalty", free_length=0, max_length=4)
    found = made.score(requesting("of one token"))
    assert (found.value, dict(found.detail)) == (-0.25, {"tokens": 1.0})


def test_repetitions_by_hand(reward, requesting):
    # "a b a b a b": the bigrams ab ba ab ba ab, 2 distinct of 5.
    assert repeated_share("a b A b a b", 2) == pytest.approx(1 - 2 / 5)
    assert repeated_share("a b", 3) == 0.0
    assert repeated_share("", 1) == 0.0
    made = reward(
        RepetitionPenalty, config.RepetitionPenaltyConfig, "repetition_penalty", ngram_size=2, max_penalty=-0.5
    )
    assert made.score(requesting("a b a b a b")).value == pytest.approx(-0.3)
    assert made.score(requesting("la " * 300_000)).value == pytest.approx(-0.5, abs=1e-5)
    assert all(-0.5 <= made.score(requesting(each)).value <= 0 for each in HOSTILE)


# -- reasoning ---------------------------------------------------------------------------------------------------------


CUT = [
    "<think>\nIs it B? \\boxed{B} The answer is B",
    "Let me see.\n<think>The answer is B",
    "<think>A</think>No, again: <think>B",
    "[THINK]B",
    "<seed:think>B",
    "<|channel|>analysis<|message|>The answer is B<|end|>",
    "analysisThe answer is B",
    'analysisThe answer is Bassistantcommentary to=functions.f json{"x": "B"}',
]
ANSWERED = [
    "<think>A?</think>B",
    "A?</think>B",
    "[THINK]A?[/THINK]B",
    "<seed:think>A?</seed:think>B",
    "<|channel|>analysis<|message|>A?<|end|><|start|>assistant<|channel|>final<|message|>B<|return|>",
    "analysisA?assistantfinalB",
    'analysisA?assistantcommentary to=functions.f json{"x": 1}assistantfinalB',
    "finalB",
]


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("response", CUT)
def test_a_response_that_ends_in_its_reasoning_gets_0(reward, requesting, name, response):
    found = reward(*ANSWERS[name], name).score(requesting(response, ground_truth="B"))
    assert (found.value, found.detail["why"]) == (0.0, "no answer")


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("response", ANSWERED)
def test_reasoning_is_no_part_of_the_answer(value, name, response):
    assert value(name, response, "B") == 1.0


def test_a_prompt_may_open_the_reasoning(reward, requesting):
    made = reward(*ANSWERS["multiple_choice"], "multiple_choice")
    given = {"ground_truth": "B", "prompt": "Q<|assistant|><think>\n"}
    assert made.score(requesting("The answer is B", **given)).value == 0.0
    assert made.score(requesting("A?</think>The answer is B", **given)).value == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "analysis of the data",
        "analysis: good",
        "Final answer",
        "finally, B",
        "finalists",
        "final B",
        "`<think>` is a mark",
    ],
)
def test_common_words_are_no_channels(text):
    assert find_answer(text) == (text, False)
