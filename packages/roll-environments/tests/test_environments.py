"""Oracles solve our environments; arithmetic and BM25 have the values worked out by hand."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from helpers_environments import call, called, play

from roll_core.spec.environment import Reply
from roll_environments.arithmetic import ExpressionError, evaluate
from roll_environments.local_search import Bm25, LocalSearch, make_question, normalised, read_corpus
from roll_environments.math_with_python import MathWithPython, make_expression
from roll_environments.text_game import TextGame

SEEDS = range(30)


def test_oracles_solve_them() -> None:
    for make, tool in ((MathWithPython, "python"), (LocalSearch, "search"), (TextGame, "")):
        openings = set()
        for seed in SEEDS:
            environment = make()
            called(environment, "reset", {}, seed)
            replies = [each if isinstance(each, str) else call(tool, **each) for each in environment.oracle()]
            opening, turns, _ = play(make(), replies, seed=seed)
            assert turns[-1].done
            assert turns[-1].metrics["success"] == 1
            assert sum(turn.reward or 0 for turn in turns) == 1
            openings.add(opening.messages[0]["content"])
        assert len(openings) > len(SEEDS) / 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 + 3 * 4", 14),
        ("-(7 // 2) % 5", 2),
        ("2 ** 10 - 24", 1000),
        ("sqrt(16) / 8", 0.5),
        ("math.gcd(12, 18)", 6),
        ("sum([1, 2, 3]) + max(4, 5)", 11),
        ("comb(5, 2) * factorial(3)", 60),
        ("round(pi, 2)", 3.14),
    ],
)
def test_arithmetic_has_its_value(text: str, value: float) -> None:
    assert evaluate(text) == value


def test_arithmetic_agrees_with_python() -> None:
    generator = random.Random(0)
    for _ in range(200):
        text = make_expression(generator, generator.randint(1, 6), generator.randint(1, 4))
        assert evaluate(text) == eval(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "1 +", "1 / 0", "0 ** -1", "'a' * 9", "True", "1 if 1 else 2", "[1, 2]", "lambda: 1", "(1).real"),
        *("__import__('os')", "().__class__", "open('x')", "sum.__self__", "math.os", "abs(-1).__class__", "f'{1}'"),
        *("9 ** 9 ** 9", "2 ** 100000", "(2 ** 4000) * (2 ** 4000)", "factorial(100000)", "comb(10**9, 5 * 10**8)"),
        *("(-8) ** 0.5", "sqrt(-1)", "exp(10000)", "1 << 99", "max(1, key=2)", "min()", "(" * 300 + "1" + ")" * 300),
        *("1" * 501, "\x00", "-" * 490 + "1" * 20, "[i for i in (1, 2)]", "sum(*[1])", "round(1e308 * 10, 2) + min"),
        *("round(5, -10**8)", "round(5, 10**8)", "round(1.5, 2.5)"),
    ],
)
def test_only_arithmetic_is_evaluated(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)


def test_wrong_calls_get_an_error_and_wrong_answers_no_reward() -> None:
    replies = [
        call("python"),
        call("shell", expression="1"),
        call("python", expression="1 / 0"),
        "It is 1,000,000,007.",
    ]
    _, turns, _ = play(MathWithPython(), replies)
    assert [turn.metrics["tool_errors"] for turn in turns[:3]] == [1, 1, 1]
    for turn in turns[:3]:
        assert "error" in json.loads(turn.messages[0]["content"])
        assert turn.messages[0]["tool_call_id"] == "call00000"
    assert (turns[3].reward, turns[3].done) == (0.0, True)


def test_tasks_from_data_replace_those_of_the_seed() -> None:
    task = {"question": "Six times seven?", "answer": "42"}
    opening, turns, _ = play(MathWithPython(), ["It is 42."], task=task)
    assert task["question"] in opening.messages[0]["content"]
    assert turns[-1].reward == 1


@pytest.mark.parametrize(
    ("answer", "reply", "reward"),
    [
        ("44253432", "44253432", 1),
        ("44253432", "44253431", 0),  # within 1e-6
        ("44253432", "44,253,432.0", 1),
        (10**20 + 1, str(10**20 + 1), 1),  # more digits than a float has
        (10**20 + 1, str(10**20), 0),
        ("0.3333333", "0.33333335", 1),
        ("0.3333333", "0.3334", 0),
        ("0.5", "9" * 400, 0),
    ],
)
def test_an_integer_must_be_exact(answer: str | int, reply: str, reward: float) -> None:
    _, turns, _ = play(MathWithPython(), [reply], task={"question": "?", "answer": answer})
    assert turns[-1].reward == reward


@pytest.mark.parametrize(("reply", "reward"), [("Answer: A", 1), ("", 0), ("Answer: the", 0), ("Answer: B", 0)])
def test_an_answer_that_is_an_article_must_be_given(reply: str, reward: float) -> None:
    _, turns, _ = play(LocalSearch(), [reply], task={"question": "A or B?", "answer": "A"})
    assert turns[-1].reward == reward


def test_several_calls_of_a_reply_have_their_results_in_order() -> None:
    calls = [
        *call("python", id="a", expression="1 + 1").tool_calls,
        *call("python", id="b", expression="2 * 4").tool_calls,
    ]
    _, (turn,), _ = play(MathWithPython(), [Reply(text="", tool_calls=calls)])
    assert [(each["tool_call_id"], each["content"]) for each in turn.messages] == [("a", "2"), ("b", "8")]


def test_bm25_has_the_scores_worked_out_by_hand() -> None:
    documents = [{"title": "a", "text": "cat cat dog"}, {"title": "b", "text": "dog"}]
    index = Bm25(documents, k1=1.0, b=0.5)
    # Lengths 4 and 2, mean 3. cat: n = 1, idf = ln(1 + 1.5/1.5) = ln 2; norm of document a = 0.5 + 0.5 * 4/3 = 7/6.
    # score = ln 2 * 2 * 2 / (2 + 7/6) = ln 2 * 24/19
    assert index.scores("cat") == pytest.approx([math.log(2) * 24 / 19, 0.0])
    # dog: n = 2, idf = ln(1 + 0.5/2.5) = ln 1.2; a: 2 / (1 + 7/6) = 12/13; b: norm 0.5 + 0.5 * 2/3 = 5/6, 2 / (11/6)
    assert index.scores("Dog!") == pytest.approx([math.log(1.2) * 12 / 13, math.log(1.2) * 12 / 11])
    assert [each["title"] for each in index.search("dog", 1)] == ["b"]
    assert index.search("bird", 3) == []


def test_both_queries_of_a_question_find_their_document_first() -> None:
    documents = read_corpus(None)
    index = Bm25(documents)
    for seed in range(100):
        _, (answer, *_), (work, person) = make_question(random.Random(seed), documents)
        assert index.search(work, 1)[0]["title"] == work
        found = index.search(person, 1)[0]
        assert found["title"] == person
        assert answer in found["text"]


def test_answers_are_compared_without_articles_and_case() -> None:
    assert normalised("The  Bridge, of Dawn.") == "bridge of dawn"


def test_a_corpus_of_the_user_is_searched(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"title": "Oslo", "text": "The capital of Norway."}\n', encoding="utf-8")
    task = {"question": "Capital of Norway?", "answer": ["Oslo", "Kristiania"]}
    _, turns, _ = play(LocalSearch(corpus=str(file)), [call("search", query="norway"), "Answer: oslo"], task=task)
    assert turns[0].messages[0]["content"].startswith("Oslo")
    assert turns[1].reward == 1


def test_the_chest_needs_the_key() -> None:
    game = TextGame(rooms=3, key_reward=0.25)
    called(game, "reset", {}, 0)
    game.rooms = {(0, 0): "hall", (0, 1): "study", (1, 0): "attic"}
    game.doors = {frozenset(((0, 0), (0, 1))), frozenset(((0, 0), (1, 0)))}
    game.position, game.key, game.chest = (0, 0), (0, 1), (1, 0)
    replies = ["take key", "go north", "GO SOUTH", "open chest", "go north", "go east", "take key"]
    turns = [called(game, "step", Reply(text=each)) for each in replies]
    assert [turn.metrics["valid"] for turn in turns] == [0, 0, 1, 0, 1, 1, 1]
    assert [turn.reward for turn in turns] == [0, 0, 0, 0, 0, 0, 0.25]
    assert turns[-1].state == "study with key"
    assert game.oracle() == ["go west", "go south", "open chest"]
