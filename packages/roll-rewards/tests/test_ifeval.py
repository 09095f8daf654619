"""Instructions of IFEval: one response that follows each, and one that does not."""

from __future__ import annotations

import json

import pytest

from roll_core.errors import DataError
from roll_rewards import ifeval
from roll_rewards.config import IFEvalConfig
from roll_rewards.ifeval import IFEvalReward, follows

CASES = [
    ("keywords:existence", {"keywords": ["red", "Dog"]}, "A RED dog.", "A rod dog."),
    ("keywords:frequency", {"keyword": "go", "frequency": 2, "relation": "at least"}, "Go going", "go one"),
    ("keywords:frequency", {"keyword": "go", "frequency": 2, "relation": "less than"}, "go", "go going"),
    ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, "badly", "So bad!"),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 3, "let_relation": "at least"}, "Banana", "Bana"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two!", "Only 3.5 m."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one two three"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        'First.\n\n"then, it ended.',
        "First.\n\nThen-ish it ended.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] [city]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hi.\n**P. S.** Bye.", "Hi.\nP.S. "),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na",
    ),
    ("detectable_format:json_format", {}, '```json {"a": 1}```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A -> poem>>\nx", "<<open\n<< >>"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "Say hi.\nHi!", "Hi! Say hi."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'So it was. the END."', "The end. Not."),
    ("startend:quotation", {}, '"all of it"', '"'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "THIS IS loud",
        "AI-DRIVEN is one",
    ),
    ("change_case:english_capital", {}, "ALL CAPS 1", "All CAPS"),
    ("change_case:english_lowercase", {}, "no caps 1", "No caps"),
    ("punctuation:no_comma", {}, "none here", "one, here"),
]


@pytest.mark.parametrize(("name", "options", "right", "wrong"), CASES)
def test_instructions_are_verified(name, options, right, wrong):
    assert follows(right, name, options)
    assert not follows(wrong, name, options)
    assert not follows("", name, options)
    assert not follows(" \n", name, options)


def test_every_instruction_has_a_case():
    assert {case[0] for case in CASES} == set(ifeval.CHECKS) - {"language:response_language"}
    assert {id for id, _ in ifeval.RLVR.values()} <= set(ifeval.CHECKS)


@pytest.fixture
def scored(reward, requesting):
    def score(response, **row):
        options = row.pop("options", {})
        return reward(IFEvalReward, IFEvalConfig, "ifeval", **options).score(requesting(response, **row))

    return score


def test_instructions_count_together_or_by_share(scored):
    row = {
        "instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase", "startend:quotation"],
        "kwargs": [{}, None, {"end_phrase": None}],
    }
    hard, soft = scored('"one, two"', **row), scored('"one, two"', options={"reward_type": "soft"}, **row)
    assert (hard.value, hard.detail["not_followed"]) == (0.0, "punctuation:no_comma")
    assert soft.value == pytest.approx(2 / 3)
    assert scored('<think>A, B</think>"one"', **row).value == 1.0
    assert scored('<think>A, B</think>"one"', options={"remove_reasoning": False}, **row).value == 0.0
    assert scored('"one"', **{key: json.dumps(each) for key, each in row.items()}).value == 1.0


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        ({"func_name": "validate_lowercase", "N": None}, "low", "Low"),
        ({"func_name": "verify_keyword_frequency", "word": "go", "N": 2}, "go Go going", "go go go"),
        ({"func_name": "validate_forbidden_words", "forbidden_words": ["bad"]}, "bed", "badly"),
        ({"func_name": "verify_letter_frequency", "letter": "a", "N": 2}, "aaA", "aaa"),
        ({"func_name": "verify_paragraph_count", "N": 2}, "a\n* * *\nb", "a\n***\nb"),
        ({"func_name": "validate_word_constraint", "N": 2, "quantifier": "at most"}, "don't go", "a b c"),
        ({"func_name": "validate_word_constraint", "N": 20, "quantifier": "around"}, "a " * 18, "a " * 23),
        ({"func_name": "verify_sentence_constraint", "N": 20, "quantifier": "around"}, "A. " * 19, "A. " * 18),
        ({"func_name": "validate_frequency_capital_words", "N": 1, "quantifier": "around"}, "A B", "A B C"),
        ({"func_name": "validate_choice", "options": "yes/no"}, "yes", "I know"),
        ({"func_name": "validate_paragraphs", "N": 1, "first_word": "Hi", "i": 1}, "hi there", "so hi"),
    ],
)
def test_rows_of_rlvr_ifeval_are_read(scored, truth, right, wrong):
    assert scored(right, ground_truth=json.dumps(truth)).value == 1.0
    assert scored(wrong, ground_truth=truth).value == 0.0


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"instruction_id_list": []},
        {"instruction_id_list": ["no:such"], "kwargs": [{}]},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]},
        {"instruction_id_list": ["keywords:frequency"], "kwargs": [{}]},
        {"instruction_id_list": ["keywords:frequency"], "kwargs": [{"keyword": "a", "frequency": "x"}]},
        {"ground_truth": "7"},
        {"ground_truth": '{"func_name": "eval"}'},
    ],
)
def test_rows_with_unusable_instructions_are_failures(scored, row):
    with pytest.raises(DataError):
        scored("a text", **row)


@pytest.mark.parametrize("response", ["\x00", "\ud800", "*" * 10**6, "[" * 10**6, "a\n" * 10**5, "<<" * 10**5])
def test_hostile_responses_are_verified_quickly(response):
    for name, options, _, _ in CASES:
        assert follows(response, name, options) in (True, False)


def test_reasoning_follows_no_instruction(reward, requesting):
    row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    made = reward(IFEvalReward, IFEvalConfig, "ifeval")
    for response, expected in (
        ("<think>a, b", 0.0),
        ("<think>a, b</think>c", 1.0),
        ("analysisA, bassistantfinalC", 1.0),
    ):
        assert made.score(requesting(response, **row)).value == expected
    whole = reward(IFEvalReward, IFEvalConfig, "ifeval", remove_reasoning=False)
    assert whole.score(requesting("<think>ab", **row)).value == 1.0
