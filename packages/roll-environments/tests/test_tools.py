"""A class of a TRL user as an environment: its methods are tools, its rewards count, its errors are located."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_environments import call, play

from roll_core.data.media import received_message
from roll_core.spec.environment import Reply
from roll_core.spec.rollout import IMAGE
from roll_environments.local_search import LocalSearch
from roll_environments.math_with_python import MathWithPython
from roll_environments.mcp_adapter import McpServer
from roll_environments.openenv_adapter import OpenEnv
from roll_environments.python_tools import PythonTools
from roll_environments.targets import WrappedError

COUNTER = "helpers_environments:Counter"


def test_public_methods_are_tools_with_docstring_schemas() -> None:
    opening, _, _ = play(PythonTools(target=COUNTER), [], task={"goal": 5})
    assert opening.messages == [{"role": "user", "content": " Count to 5."}]
    functions = {each["function"]["name"]: each["function"] for each in opening.tools}
    assert functions.keys() == {"add", "undo"}
    assert functions["add"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert functions["add"]["parameters"]["required"] == ["number"]


def test_text_of_reset_is_appended_to_the_prompt_of_the_row() -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Begin."}]
    opening, _, _ = play(PythonTools(target=COUNTER), [], task={"prompt": prompt})
    assert [each["content"] for each in opening.messages] == ["Be brief.", "Begin. Count to 3."]
    assert prompt[1]["content"] == "Begin."


def test_calls_change_the_object_and_its_reward_counts() -> None:
    replies = [call("add", number=2), call("undo"), call("add", number=3), "Done."]
    _, turns, score = play(PythonTools(target=COUNTER), replies)
    assert [turn.messages[0]["content"] for turn in turns[:3]] == ["2", "done", "3"]
    assert (turns[3].done, turns[3].reward) == (True, None)
    assert score is not None
    assert (score.value, score.detail) == (1.0, {"Counter": 1.0})


def test_reward_functions_of_trl_get_the_object_and_the_columns() -> None:
    environment = PythonTools(target=COUNTER, rewards=["helpers_environments:closeness"])
    _, _, score = play(environment, [call("add", number=4), "Done."], task={"goal": 8})
    assert score is not None
    assert score.detail == {"Counter": 0.0, "closeness": 0.5 * 3 + 4 / 8}
    assert score.value == 2.0


@pytest.mark.parametrize(
    "reply",
    [
        call("subtract", number=1),
        call("_secret"),
        call("get_reward"),
        call("add"),
        call("add", number=1, other=2),
        call("add", number=-1),
        Reply(text="", tool_calls=[{"function": {"name": "add", "arguments": "{"}}]),
        Reply(text="", tool_calls=[{"function": {"name": "add", "arguments": "[1]"}}]),
    ],
)
def test_mistakes_of_the_model_are_answered(reply: Reply) -> None:
    _, (turn,), score = play(PythonTools(target=COUNTER), [reply])
    assert "error" in json.loads(turn.messages[0]["content"])
    assert turn.metrics == {"tool_errors": 1.0}
    assert score is not None
    assert score.value == 0


def test_a_malformed_call_is_no_end() -> None:
    reply = Reply(text="<tool_call>{", parse_error="the JSON ends")
    for environment in (PythonTools(target=COUNTER), MathWithPython(), LocalSearch()):
        _, (turn,), _ = play(environment, [reply])
        assert not turn.done
        assert "the JSON ends" in turn.messages[0]["content"]


@pytest.mark.parametrize(
    ("environment", "good"),
    [
        (PythonTools(target=COUNTER), call("add", number=1)),
        (MathWithPython(), call("python", expression="1 + 1")),
        (LocalSearch(), call("search", query="a")),
    ],
)
def test_a_malformed_call_beside_a_good_one_is_named(environment: Any, good: Reply) -> None:
    reply = Reply(text="<tool_call>{", tool_calls=good.tool_calls, parse_error="the JSON ends")
    _, (turn,), _ = play(environment, [reply])
    (message,) = turn.messages
    assert message["role"] == "tool"
    assert "the JSON ends" in message["content"]
    assert turn.metrics == {"tool_errors": 0.5}


def test_an_episode_of_mistakes_has_a_reward() -> None:
    """Without one it would be a failure of the environment, which is retried and never trained on."""
    malformed = Reply(text="<tool_call>{", parse_error="the JSON ends")
    for environment in (PythonTools(target=COUNTER), MathWithPython(), LocalSearch()):
        for reply in (malformed, call("unknown", id="1")):
            _, turns, score = play(environment, [reply] * 3)
            assert [each.metrics["tool_errors"] for each in turns] == [1.0] * 3
            assert sum(each.reward or 0.0 for each in turns) == 0.0
            assert score is not None or all(each.reward is not None for each in turns)


def test_openenv_calls_after_the_end_of_an_episode_earn_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = OpenEnv(url="http://127.0.0.1:1", tools=True)
    environment.names, environment.called = ["turn"], False
    sent = []

    def request(kind: str, data: Any) -> Any:
        sent.append(data["arguments"])
        return {"observation": {"result": "open"}, "reward": 1.0, "done": True}

    monkeypatch.setattr(environment, "_request", request)
    calls = [each for number in (6, 6) for each in call("turn", number=number).tool_calls]
    turn = environment.step(Reply(text="", tool_calls=calls))
    assert (turn.reward, turn.done, sent) == (1.0, True, [{"number": 6}])


def test_every_part_of_an_mcp_result_has_a_text() -> None:
    def part(kind: str, **given: Any) -> Any:
        return SimpleNamespace(type=kind, **given)

    environment = McpServer(url="http://127.0.0.1:1")
    content = [
        part("text", text="Here:"),
        part("resource", resource=SimpleNamespace(text="a = 1")),
        part("resource", resource=SimpleNamespace(blob="AA==")),
        part("image", data="AA=="),
    ]
    result = SimpleNamespace(content=content, structured_content={"a": 1}, is_error=False)
    environment.client = SimpleNamespace(call_tool=None)
    environment.portal = SimpleNamespace(call=lambda *given: result)  # type: ignore[assignment]
    assert environment._call("read", {}) == ("Here:\na = 1\n[resource]\n[image]", [], False)
    result.content = [part("image", data="AA==", mime_type="image/png"), part("text", text="it")]
    assert environment._call("read", {}) == (f"{IMAGE}\nit", [b"\0"], False)
    result.content = []
    assert environment._call("read", {}) == ('{"a": 1}', [], False)


@pytest.mark.parametrize("stage", ["init", "reset", "act", "reward"])
def test_a_failure_names_the_class_and_never_is_a_reward(stage: str) -> None:
    options: dict[str, Any] = {"target": "helpers_environments:Faulty", "options": {"at": stage}, "tool_errors": "fail"}
    with pytest.raises(WrappedError, match=r"helpers_environments:Faulty.*ValueError"):
        play(PythonTools(**options), [call("act"), "done"])


def test_results_of_tools_may_have_images() -> None:
    environment = PythonTools(target="helpers_environments:Painter")
    _, turns, _ = play(environment, [call("paint"), call("describe"), call("undo"), "Done."])
    painted, described, undone = (received_message(turn.messages[0]) for turn in turns[:3])
    assert painted["content"] == IMAGE
    assert described["content"] == f"a\ufffdb\n{IMAGE}\n3"
    for message in (painted, described):
        assert [media.image().getpixel((0, 0)) for media in message["media"]] == [(3, 0, 0)]
    assert undone == {"role": "tool", "tool_call_id": "call00000", "name": "undo", "content": "done"}
