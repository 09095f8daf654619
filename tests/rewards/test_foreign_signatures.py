"""Reward functions as users of TRL, verl and OpenRLHF write them, unchanged under `reward: function`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from roll_core.errors import ConfigError, RewardFailure
from roll_rewards.function import FunctionReward
from roll_rewards.function_config import FunctionConfig
from roll_testing.errors import raises_error

CHAT = [{"role": "user", "content": "2+2?"}]

LENGTH = """
def reward_func(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]
"""
FORMAT = """
import re

def reward_func(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]
"""
BOXED = r"""
import re

def reward_func(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]
"""
TASKS = """
def reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        rewards.append(float(prompt + completion == "2+2?4") if t == "math" else None)
    return rewards
"""
ASYNC = """
import asyncio

loops = set()

async def reward_func(prompts, completions, **kwargs):
    loops.add(id(asyncio.get_running_loop()))
    await asyncio.sleep(0)
    return [float(len(completion)) for completion in completions]
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info == {"index": 3}, (data_source, extra_info)
    return solution_str.endswith(ground_truth)
"""
VERL_DICT = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.5, "acc": True, "pred": solution_str, "parts": [1, 2], "skipped": None}
"""
OPENRLHF = """
def reward_func(queries, prompts, labels, **kwargs):
    assert prompts == ["<user>2+2?"], prompts
    rewards = [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels)]
    return {"rewards": rewards, "scores": [0.5], "extra_logs": {"length": [len(queries[0])], "kind": "sum"}}
"""
ROW = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 3},
    "ability": "math",
}


@pytest.fixture
def reward_of(user_module):
    rewards = []

    def make(source, function="reward_func", **config):
        name = f"{user_module(source)}:{function}"
        reward = FunctionReward(FunctionConfig(reward="function", function=name, **config))
        rewards.append(reward)
        reward.start()
        return reward

    yield make
    for reward in rewards:
        reward.close()


def asked(asking, response, columns):
    """A request for a row with these columns."""
    request = asking(response, "<user>2+2?")
    return replace(request, messages=CHAT, sample=replace(request.sample, metadata=columns))


@pytest.mark.parametrize(
    ("source", "response", "columns", "value"),
    [
        (LENGTH, "anything", {}, 1.0),
        (BOXED, r"so \boxed{4}", {"ground_truth": "4"}, 1.0),
        (BOXED, r"so \boxed{5}", {"ground_truth": "4", "prompt": "2+2?"}, 0.0),
        (FORMAT, "<think>a</think><answer>4</answer>", {"prompt": CHAT}, 1.0),
        (FORMAT, "4", {"messages": CHAT}, 0.0),
        (FORMAT, "<think>a</think><answer>4</answer>", {"messages": json.dumps(CHAT)}, 1.0),
        (BOXED, r"\boxed{4}", {"ground_truth": "4", "notes": "[not JSON", "levels": "[1]"}, 1.0),
        (TASKS, "4", {"task": "math"}, 1.0),
        (ASYNC, "1234", {}, 4.0),
    ],
)
def test_functions_of_trls_documentation_run_unchanged(reward_of, asking, source, response, columns, value):
    request = asked(asking, response, columns)
    assert reward_of(source, isolation="none").score(request).value == value


def test_a_function_for_trl_gets_what_trl_passes(reward_of, asking):
    source = """
    def reward_func(prompts, completions, completion_ids, **kwargs):
        assert prompts == [CHAT] and completions == [[{"role": "assistant", "content": "4"}]], (prompts, completions)
        assert completion_ids == [[2]] and kwargs == {"level": [3]}, kwargs
        return [1]
    """.replace("CHAT", repr(CHAT))
    reward = reward_of(source)
    request = asked(asking, "4", {"level": 3, "prompt": CHAT, "completion": "x"})
    assert reward.score(request).value == 1


def test_coroutines_of_one_process_share_a_loop(reward_of, asking):
    source = ASYNC.replace("return [float(len(completion)) for completion in completions]", "return [len(loops)]")
    reward = reward_of(source, processes=1)
    assert [reward.score(asking("4")).value for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("returned", "facts"),
    [
        ("[None]", ("None", "apply")),
        ("[float('nan')]", ("nan",)),
        ("[1.0, 2.0]", ("2 values", "1 completion")),
        ("[]", ("0 values",)),
        ("1.0", ("float", "list")),
        ("['a']", ("str",)),
    ],
)
def test_invalid_return_of_a_trl_function_names_it(reward_of, asking, returned, facts):
    reward = reward_of(f"def reward_func(completions, **kwargs): return {returned}", isolation="none")
    with raises_error(RewardFailure, ":reward_func", *facts):
        reward.score(asking("4"))


@pytest.mark.parametrize("row", [ROW, {key: ROW[key] for key in ("data_source", "extra_info")} | {"ground_truth": "4"}])
def test_a_function_for_verl_runs_unchanged(reward_of, asking, row):
    reward = reward_of(VERL, "compute_score")
    assert [reward.score(asking(text, **row)).value for text in ("it is 4", "it is 5")] == [1.0, 0.0]


def test_a_dict_of_verl_has_a_score_and_details(reward_of, asking):
    found = reward_of(VERL_DICT, "compute_score").score(asking("4", **ROW))
    assert found.value == 0.5
    assert found.detail == {"acc": 1.0, "pred": "4", "parts": "[1, 2]", "skipped": "None"}


@pytest.mark.parametrize(
    ("returned", "fact"), [("{'acc': 1.0}", "score"), ("None", "NoneType"), ("float('inf')", "inf")]
)
def test_invalid_return_of_a_verl_function_names_it(reward_of, asking, returned, fact):
    source = f"def compute_score(data_source, solution_str, ground_truth, extra_info): return {returned}"
    with raises_error(RewardFailure, ":compute_score", fact):
        reward_of(source, "compute_score", isolation="none").score(asking("4", **ROW))


def test_a_function_for_openrlhf_runs_unchanged(reward_of, asking):
    reward = reward_of(OPENRLHF, label="answer")
    found = [reward.score(asked(asking, text, {"answer": "4"})) for text in ("4", "5")]
    assert [each.value for each in found] == [1.0, 0.0]
    assert found[0].detail == {"scores": 0.5, "length": 11.0, "kind": "sum"}


@pytest.mark.parametrize("returned", ["[0.5]", "{'rewards': 0.5}", "{'rewards': [[0.5]]}", "numpy.array([0.5])"])
def test_a_reward_of_openrlhf_is_a_number_a_list_or_an_array(reward_of, asking, returned):
    source = f"import numpy\ndef f(q, p, answers):\n    assert answers == ['']\n    return {returned}"
    assert reward_of(source, "f", signature="openrlhf", isolation="none").score(asking("4")).value == 0.5


@pytest.mark.parametrize(
    ("returned", "fact"),
    [("{'scores': [1.0]}", "rewards"), ("{'rewards': [1.0, 2.0]}", "2 rewards"), ("{'rewards': ['x']}", "str")],
)
def test_invalid_return_of_an_openrlhf_function_names_it(reward_of, asking, returned, fact):
    reward = reward_of(f"def reward_func(queries, prompts, labels): return {returned}", isolation="none")
    with raises_error(RewardFailure, ":reward_func", fact):
        reward.score(asking("4"))


@pytest.mark.parametrize(
    ("source", "signature", "facts"),
    [
        ("def f(completions, trainer_state): return [1]", "auto", ("'trainer_state'",)),
        ("def f(completions, /): return [1]", "auto", ("'completions'",)),
        ("def f(completions, solution): return [1]", "auto", ("'solution'", "question")),
        ("def f(completions, prompt): return [1]", "trl", ("'prompt'",)),
        ("def f(data_source, solution_str, ground_truth): return 1", "auto", ("extra_info",)),
        ("def f(data_source, solution_str, ground_truth, extra_info, more): return 1", "auto", ("'more'",)),
        ("def f(data_source, solution_str, ground_truth, extra_info): return 1", "verl", ("'data_source'",)),
        ("def f(completions, **kwargs): return [1]", "roll", ("f(prompt, response, **metadata)",)),
        ("def f(queries, prompts): return [1]", "auto", ("f(queries, prompts, labels)",)),
    ],
)
def test_a_function_that_the_rows_cannot_serve_is_found_by_check(user_module, source, signature, facts):
    name = f"{user_module(source)}:f"
    config = FunctionConfig(reward="function", function=name, signature=signature)
    (problem,) = config.check_code({"question", "answer"}, 60).values()
    assert all(fact in problem for fact in (name, *facts)), problem


def test_a_column_of_labels_is_in_each_row_and_only_for_openrlhf(reward_of, asking, user_module):
    source = "def f(queries, prompts, labels): return labels"
    with raises_error(RewardFailure, "answer"):
        reward_of(source, "f", label="answer", isolation="none").score(asking("4"))
    for text, fact in ((source, "answer"), ("def f(prompt, response): return 1", "label")):
        config = FunctionConfig(reward="function", function=f"{user_module(text)}:f", label="answer")
        (problem,) = config.check_code({"question"}, 60).values()
        assert fact in problem
        assert not config.model_copy(update={"label": None}).check_code({"question"}, 60)


def test_column_may_have_the_name_of_a_foreign_parameter(user_module):
    name = f"{user_module('def f(prompt, response, queries): return 1')}:f"
    assert not FunctionConfig(reward="function", function=name).check_code({"queries"}, 60)


def test_the_key_decides_if_names_of_parameters_do_not(reward_of, asking):
    source = "def f(**kwargs): return [float(kwargs['completions'] == ['4'])]"
    assert reward_of(source, "f", signature="trl").score(asking("4")).value == 1
    with raises_error(ConfigError, "f(prompt, response, **metadata)"):
        reward_of(source, "f")
