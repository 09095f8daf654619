"""`reward: function`: what the user's function is given, and what becomes of what it does."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from pydantic import ValidationError

from roll_core.errors import ConfigError, DataError, RewardFailure
from roll_rewards.function import FunctionReward
from roll_rewards.function_config import FunctionConfig
from roll_testing.errors import raises_error

BOTH = pytest.mark.parametrize("isolation", ["process", "none"])


@pytest.fixture
def reward_of(user_module):
    rewards = []

    def make(source, function="f", **config):
        module = user_module(source)
        reward = FunctionReward(FunctionConfig(reward="function", function=f"{module}:{function}", **config))
        rewards.append(reward)
        reward.start()
        return reward

    yield make
    for reward in rewards:
        reward.close()


@BOTH
def test_a_function_gets_prompt_response_and_columns(reward_of, asking, isolation):
    reward = reward_of(
        """
        def f(prompt, response, **metadata):
            assert prompt == "2+2?" and response == "4", (prompt, response)
            assert metadata == {"answer": 4, "tags": ["sum"]}, metadata
            return 0.5
        """,
        isolation=isolation,
    )
    assert reward.score(asking("4", "2+2?", answer=4, tags=["sum"])).value == 0.5


def test_a_function_gets_only_the_columns_that_it_names(reward_of, asking):
    reward = reward_of(
        "def f(question, reply, answer, *, unit=''): return float(reply == answer + unit)", isolation="none"
    )
    assert reward.score(asking("4 m", answer="4", unit=" m", difficulty=3, question="x")).value == 1.0


def test_a_column_called_like_an_argument_does_not_collide(reward_of, asking):
    reward = reward_of("def f(prompt, response, **metadata): return len(metadata)", isolation="none")
    assert reward.score(asking("4", response_column=1)).value == 1
    request = asking("4")
    object.__setattr__(request.sample, "metadata", {"prompt": "p", "response": "r", "other": 1})
    assert reward.score(request).value == 1


@pytest.mark.parametrize(
    ("isolation", "returned", "value", "detail"),
    [
        ("none", "1", 1.0, {}),
        ("none", "True", 1.0, {}),
        ("none", "-2.5", -2.5, {}),
        ("none", "__import__('numpy').bool_(True)", 1.0, {}),
        ("process", "__import__('numpy').float32(0.25)", 0.25, {}),
        ("process", "__import__('fractions').Fraction(1, 4)", 0.25, {}),
        ("process", "{'value': 0.5, 'format': 1, 'why': 'close'}", 0.5, {"format": 1.0, "why": "close"}),
        ("process", "__import__('roll_core.types').types.Reward(value=2.0, detail={'a': 1.0})", 2.0, {"a": 1.0}),
    ],
)
def test_valid_return_values_are_rewards(reward_of, asking, isolation, returned, value, detail):
    found = reward_of(f"def f(prompt, response): return {returned}", isolation=isolation).score(asking("x"))
    assert (found.value, dict(found.detail), found.failed) == (value, detail, False)


@BOTH
@pytest.mark.parametrize(
    "returned",
    [
        "{'value': None, 'failure': 'no judge'}",
        "__import__('roll_core.types').types.Reward(value=None, failure='no judge')",
    ],
)
def test_function_may_report_a_failure(reward_of, asking, isolation, returned):
    found = reward_of(f"def f(prompt, response): return {returned}", isolation=isolation).score(asking("x"))
    assert (found.value, found.failure) == (None, "no judge")


@pytest.mark.parametrize(
    ("isolation", "body", "facts"),
    [
        ("none", "return None", ("NoneType",)),
        ("none", "return '1.0'", ("str",)),
        ("none", "return [1.0]", ("list",)),
        ("process", "return 1j", ("complex",)),
        ("process", "return float('nan')", ("nan",)),
        ("none", "return float('-inf')", ("-inf",)),
        ("none", "return {'score': 1.0}", ("failure",)),
        ("none", "return {'value': 1.0, 'parts': [1]}", ("'parts'",)),
        ("process", "return {'value': 1.0, 'part': float('nan')}", ("'part'",)),
        ("none", "raise SystemExit(1)", ("SystemExit", "1")),
        *(
            (isolation, body, facts)
            for isolation in ("process", "none")
            for body, facts in (
                ("return {}['answer']", ("KeyError", "'answer'", "1")),
                ("import roll_core.errors as e; raise e.RewardFailure('judge offline')", ("judge", "offline")),
            )
        ),
        ("process", "raise SystemExit(1)", ("SystemExit", "1")),
    ],
)
def test_invalid_results_are_failures_with_their_cause(reward_of, asking, isolation, body, facts):
    reward = reward_of(f"def f(prompt, response): {body}", isolation=isolation)
    with raises_error(RewardFailure, *facts):
        reward.score(asking("x"))


def test_a_failure_beside_a_value_is_a_failure(reward_of, asking):
    made = reward_of("def f(p, r): return {'value': 1.0, 'failure': 'offline', 'part': 2}", isolation="none")
    found = made.score(asking("x"))
    assert (found.value, found.failure, found.detail) == (None, "offline", {"part": 2.0})


@BOTH
def test_an_exception_without_a_text_is_a_failure(reward_of, asking, isolation):
    body = "class E(Exception):\n    def __str__(self): raise TypeError\n    __repr__ = __str__\n"
    made = reward_of(f"{body}def f(p, r):\n    if r == 'x': raise E\n    return 1.0", isolation=isolation)
    with raises_error(RewardFailure, "E", "TypeError"):
        made.score(asking("x"))
    assert made.score(asking("y")).value == 1.0


def test_a_missing_column_is_a_failure_that_names_it(reward_of, asking):
    reward = reward_of("def f(prompt, response, answer): return 1", isolation="none")
    with raises_error(RewardFailure, "TypeError", "'answer'"):
        reward.score(asking("x", solution=1))


def test_exception_names_the_empty_columns_of_the_row(reward_of, asking):
    reward = reward_of("def f(prompt, response, answer, source, hint=None): return len(answer)", isolation="none")
    with raises_error(RewardFailure, "TypeError", "answer", "hint") as caught:
        reward.score(asking("x", answer=None, source="book", hint=None))
    assert "source" not in str(caught.value)
    with raises_error(RewardFailure, "TypeError") as caught:
        reward.score(asking("x", answer=1, source="book", hint="none"))
    assert "hint" not in str(caught.value)


@BOTH
def test_a_function_that_hangs_is_a_failure_at_its_deadline(reward_of, asking, isolation, tmp_path):
    reward = reward_of(
        """
        import pathlib, time
        def f(prompt, response):
            while response == "hang" and not pathlib.Path(__file__).with_name("enough").exists():
                time.sleep(0.01)
            return 1
        """,
        isolation=isolation,
        timeout_s=2,
    )
    with raises_error(RewardFailure, "2"):
        reward.score(asking("hang"))
    assert reward.score(asking("go on")).value == 1.0
    (tmp_path / "enough").touch()


def test_hanging_calls_without_isolation_are_limited(reward_of, asking):
    release = threading.Event()
    reward = reward_of("def f(prompt, response, wait): return wait()", isolation="none", timeout_s=0.5)
    for _ in range(8):
        with raises_error(RewardFailure, "0.5"):
            reward.score(asking("x", wait=release.wait))
    with raises_error(RewardFailure, "8", "isolation"):
        reward.score(asking("x", wait=release.wait))
    release.set()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(thread.name == "reward-call" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert reward.score(asking("x", wait=lambda: 1.0)).value == 1.0


@pytest.mark.parametrize(
    ("isolation", "source", "function", "facts"),
    [
        ("none", "raise RuntimeError('no model')", "f", ("RuntimeError",)),
        ("process", "import no_such_module_anywhere", "f", ("'no_such_module_anywhere'",)),
        ("none", "import sys; sys.exit(1)", "f", ("SystemExit", "1")),
        ("process", "import sys; sys.exit(1)", "f", ("SystemExit", "1")),
        ("none", "def g(prompt, response): return 1", "f", ("'f'",)),
        ("none", "def score(prompt, response): return 1", "scor", ("'scor'", "score?")),
        ("none", "f = 3", "f", ("int",)),
        ("none", "def f(prompt): return 1", "f", ("f(prompt, response, **metadata)",)),
        ("process", "async def f(prompt, response): return 1", "f", ("coroutine",)),
    ],
)
def test_unusable_function_is_reported_before_the_start(reward_of, isolation, source, function, facts):
    with raises_error(ConfigError, *facts) as caught:
        reward_of(source, function, isolation=isolation)
    assert caught.value.problems[0].key == "function"
    assert "working directory" in caught.value.problems[0].hint


def test_a_method_of_a_class_can_be_named(reward_of, asking):
    reward = reward_of(
        "class Judge:\n    @staticmethod\n    def f(prompt, response): return len(response)",
        "Judge.f",
        isolation="process",
    )
    assert reward.score(asking("four")).value == 4.0


def test_text_of_any_kind_arrives_as_it_is(reward_of, asking):
    reward = reward_of("def f(prompt, response): return sum(map(ord, response)) + len(response)", isolation="process")
    for text in ["", "Grüße 世界 🎲", "\ud800 \x00", '{"result": {"value": 1}}\n', "x" * 10_000]:
        assert reward.score(asking(text)).value == sum(map(ord, text)) + len(text)


@BOTH
def test_many_threads_get_their_own_answers(reward_of, asking, isolation):
    reward = reward_of("def f(prompt, response): return int(response)", isolation=isolation)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda i: reward.score(asking(str(i))).value, range(512)))
    assert found == list(range(512))


def test_arrays_travel_to_the_process_as_lists(reward_of, asking):
    reward = reward_of("def f(prompt, response, grid, scale): return sum(map(sum, grid)) * scale")
    assert reward.score(asking("", grid=np.ones((2, 3)), scale=np.float32(2))).value == 12.0


def test_a_column_that_cannot_travel_is_named(reward_of, asking):
    reward = reward_of("def f(prompt, response, **metadata): return 1")
    with raises_error(DataError, "'when'"):
        reward.score(asking("", when=object()))


def test_close_works_before_the_start_and_twice(user_module, asking):
    name = user_module("def f(prompt, response, **metadata): return 1")
    reward = FunctionReward(FunctionConfig(reward="function", function=f"{name}:f"))
    reward.close()
    reward.start()
    assert reward.score(asking("")).value == 1.0
    reward.close()
    reward.close()
    with raises_error(RewardFailure, "closed"):
        reward.score(asking(""))


@pytest.mark.parametrize("function", ["rewards.py", "rewards", ":f", "m:", "m:f()", "m:f; import os", "../m:f"])
def test_a_function_that_is_not_module_and_name_is_refused(function):
    with pytest.raises(ValidationError):
        FunctionConfig(reward="function", function=function)


def test_the_deadline_is_positive():
    with pytest.raises(ValidationError):
        FunctionConfig(reward="function", function="m:f", timeout_s=0)
    assert math.isfinite(FunctionConfig(reward="function", function="m:f").timeout_s)
