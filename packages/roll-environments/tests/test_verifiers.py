"""Real environments of verifiers: rewards beside verifiers' own, errors, and runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_environment_runs import metrics, run
from helpers_environments import Policy
from pydantic import ValidationError

from roll_core.spec.agent import Session
from roll_core.types import Reward
from roll_environments import config
from roll_environments.targets import WrappedError
from roll_environments.verifiers_adapter import Verifiers, env_config
from roll_testing.errors import mentions, raises_error

pytestmark = pytest.mark.engine("verifiers")
CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "spell", "arguments": json.dumps({"word": "oak"})},
}


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    found = Policy()
    yield found
    found.server.shutdown()
    found.server.server_close()


def words(seat: dict[str, Any] | None = None, *, id: str = "", task: dict[str, Any] | None = None, **keys: Any) -> Any:
    agent = {"runtime": {"type": "subprocess"}, **(seat or {})}
    return {
        "taskset": {"id": "verifiers_words", "task": task or {}},
        "agent": agent,
        **({"id": id} if id else {}),
        **keys,
    }


def play(policy: Policy, env: dict[str, Any], *replies: Any, idx: int = 1, **given: Any) -> Reward:
    policy.given(*replies)
    agent = Verifiers(env=env, **given)
    return asyncio.run(agent.run({"idx": idx}, Session(base_url=policy.url, api_key="secret", seed=0)))


def own(policy: Policy, monkeypatch: pytest.MonkeyPatch, env: dict[str, Any], *replies: Any) -> Any:
    """The trace of verifiers' own runner on task 1."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment

    policy.given(*replies)
    monkeypatch.setenv("OWN_KEY", "secret")
    environment = load_environment(env_config(env))
    client = vf.EvalClientConfig(base_url=policy.url, api_key_var="OWN_KEY")

    async def main() -> Any:
        async with environment.serving():
            (slot,) = environment.slots(list(environment.taskset)[1])
            return await environment.run_slot(slot, vf.ModelContext(model="m", client=client))

    (trace,) = asyncio.run(main()).traces
    return trace


@pytest.mark.parametrize(
    ("env", "replies", "value", "detail"),
    [
        (words(), ["an oak"], 2 + 0.25 / 7, {"says": 2.0, "short": 0.25 / 7, "spelled": 0.0}),
        (words(), ["elm"], 0.25 / 4, {"says": 0.0, "short": 0.25 / 4, "spelled": 0.0}),
        (
            words(id="verifiers_conversation"),
            ["elm", "oak"],
            2 + 0.25 / 4,
            {"says": 2.0, "short": 0.25 / 4, "spelled": 0.0},
        ),
        pytest.param(
            words(task={"tools": True}),
            [{"role": "assistant", "content": None, "tool_calls": [CALL]}, "oak"],
            2 + 0.25 / 4,
            {"says": 2.0, "short": 0.25 / 4, "spelled": 1.0},
            marks=pytest.mark.slow,  # starts the tool server twice
        ),
    ],
    ids=["right", "wrong", "turns", "tools"],
)
def test_rewards_are_those_of_verifiers(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, env: Any, replies: Any, value: float, detail: dict[str, float]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where the tool server's process finds its module
    found = play(policy, env, *replies)
    ours = policy.requests
    assert found.value == pytest.approx(value, abs=1e-12)
    assert dict(found.detail) == pytest.approx(detail)
    trace = own(policy, monkeypatch, env, *replies)
    assert found.value == trace.reward
    assert {name: found.detail[name] for name in trace.rewards} == {
        name: each.value for name, each in trace.rewards.items()
    }
    assert [each["messages"] for each in ours] == [each["messages"] for each in policy.requests]
    assert len(ours) == len(replies)
    assert {each["key"] for each in ours} == {"Bearer secret"}


def test_the_seed_chooses_among_the_selected_tasks(policy: Policy) -> None:
    for seed, word in ((0, "elm"), (3, "oak")):
        policy.given("x")
        agent = Verifiers(env=words(), select={"limit": 2})
        asyncio.run(agent.run({}, Session(base_url=policy.url, api_key="secret", seed=seed)))
        assert word in policy.requests[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("env", "facts"),
    [
        (words(task={"fails": "setup"}), ["TaskError", "ValueError"]),
        (words(task={"fails": "reward"}), ["TaskError", "ValueError"]),
        (words(task={"rewarded": False}), ["WordTask"]),
        (words(id="verifiers_conversation", runs=2, asked=1), ["2"]),
    ],
)
def test_a_failure_names_the_environment_and_is_no_reward(policy: Policy, env: Any, facts: list[str]) -> None:
    with raises_error(WrappedError, "verifiers", "verifiers_words", *facts):
        play(policy, env, "oak", "oak")


def test_a_task_that_does_not_exist_is_named(policy: Policy) -> None:
    with raises_error(WrappedError, "verifiers_words", "3"):
        play(policy, words(), idx=3)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({}, ["env"]),
        ({"env": {}}, ["env", "taskset.id"]),
        ({"env": {"taskset": ["verifiers_words"]}}, ["env", "taskset.id"]),
        ({"env": {"taskset": {"id": "no_such_words"}}}, ["env", "no_such_words"]),
        ({"env": words(id="no_such_env")}, ["env", "no_such_env"]),
        ({"env": words({"runtime": {"type": "prime"}})}, ["env", "agent.runtime", "PRIME_API_KEY"]),
        ({"env": words({"max_turn": 3})}, ["env", "max_turn"]),
        ({"env": words({"retries": {"max_retries": 1}})}, ["env", "agent.retries"]),
        ({"env": words(id="verifiers_conversation", judge={"client": None})}, ["env", "agent", "judge"]),
        ({"env": words(), "select": {"limits": 3}}, ["select", "limits"]),
    ],
)
def test_mistakes_are_located(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], facts: list[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    with pytest.raises(ValidationError) as caught:
        config.VerifiersConfig(**options)
    text = "\n".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in caught.value.errors())
    assert mentions(text, *facts), text


@pytest.mark.parametrize("env", [words(), words(id="verifiers_conversation")], ids=["single", "turns"])
def test_an_environment_of_verifiers_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: Any) -> None:
    """Two steps in processes. The rewards are those of the replies that were trained on."""
    monkeypatch.chdir(Path(__file__).parent)
    entry = {"agent": "verifiers", "agent_config": {"env": env}, "concurrency": 1}
    result = run(tmp_path, entry, max_steps=2)
    line = metrics(result)
    turns = 2 if "id" in env else 1
    assert line["env/env/turns/mean"] == line["agent/env/calls/mean"] == turns
    assert line["rollout/forks"] == 0
    (file,) = result.run_dir.path.rglob("samples.jsonl")
    rows = [json.loads(each) for each in file.read_text(encoding="utf-8").splitlines()]
    assert rows
    for row in rows:
        assert row["reward"] == pytest.approx(row["detail"]["says"] + row["detail"]["short"], abs=1e-5)
