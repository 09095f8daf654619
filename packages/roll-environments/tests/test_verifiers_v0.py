"""Real environments of verifiers 0.2: rewards beside verifiers' own, errors, and runs."""

from __future__ import annotations

import asyncio
import json
import signal
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
from roll_environments.verifiers_v0_adapter import VerifiersV0
from roll_testing.errors import mentions, raises_error

pytestmark = pytest.mark.engine("verifiers")
NAME = "verifiers_v0_words"
CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "spell", "arguments": json.dumps({"word": "oak"})},
}
TURNS = ("elm", "oak")
TOOLS = ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "oak")


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    found = Policy()
    yield found
    found.server.shutdown()
    found.server.server_close()


def play(policy: Policy, args: dict[str, Any], *replies: Any, idx: int = 1, **given: Any) -> Reward:
    policy.given(*replies)
    agent = VerifiersV0(id=NAME, args=args, **given)
    return agent.run({"idx": idx}, Session(base_url=policy.url, api_key="secret", seed=0))


def own(policy: Policy, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], *replies: Any) -> Any:
    """What verifiers itself says of row 1."""
    import verifiers as vf

    policy.given(*replies)
    monkeypatch.setenv("OWN_KEY", "secret")
    environment = vf.load_environment(NAME, **args)
    client = vf.ClientConfig(api_base_url=policy.url, api_key_var="OWN_KEY")
    rows = environment.get_dataset().select([1])
    (output,) = asyncio.run(environment.generate(rows, client, "policy", sampling_args={}))["outputs"]
    return output


@pytest.mark.parametrize(
    ("args", "replies", "value", "detail"),
    [
        ({}, ["an oak"], 2 + 0.25 / 7, {"says": 1.0, "short": 1 / 7, "spelled": 0.0, "num_turns": 1.0}),
        ({}, ["elm"], 0.25 / 4, {"says": 0.0, "short": 1 / 4, "spelled": 0.0, "num_turns": 1.0}),
        ({"kind": "turns"}, TURNS, 2 + 0.25 / 4, {"says": 1.0, "short": 1 / 4, "spelled": 0.0, "num_turns": 2.0}),
        (
            {"kind": "tools"},
            TOOLS,
            2 + 0.25 / 4,
            {"says": 1.0, "short": 1 / 4, "spelled": 1.0, "num_turns": 2.0, "total_tool_calls": 1, "spell_calls": 1},
        ),
        ({"kind": "group"}, ["oak"], 2 + 0.25 / 4, {"says": 1.0, "short": 1 / 4, "spelled": 0.0, "num_turns": 1.0}),
    ],
    ids=["right", "wrong", "turns", "tools", "group"],
)
def test_rewards_and_requests_are_those_of_verifiers(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, args: Any, replies: Any, value: float, detail: dict[str, float]
) -> None:
    found = play(policy, args, *replies)
    ours = policy.requests
    assert found.value == pytest.approx(value, abs=1e-12)
    assert dict(found.detail) == pytest.approx(detail)
    output = own(policy, monkeypatch, args, *replies)
    assert found.value == output["reward"]
    assert dict(found.detail) == output["metrics"]
    assert [each["messages"] for each in ours] == [each["messages"] for each in policy.requests]
    assert [each.get("tools") for each in ours] == [each.get("tools") for each in policy.requests]
    assert len(ours) == len(replies)
    assert {each["key"] for each in ours} == {"Bearer secret"}


def test_the_seed_chooses_among_the_rows_of_the_split(policy: Policy) -> None:
    for split, seed, word in (("train", 0, "elm"), ("train", 4, "oak"), ("eval", 4, "yew")):
        policy.given("x")
        VerifiersV0(id=NAME, split=split).run({}, Session(base_url=policy.url, api_key="secret", seed=seed))
        assert word in policy.requests[0]["messages"][0]["content"]


def test_an_environment_keeps_the_signal_handlers_of_its_process(policy: Policy) -> None:
    before = signal.getsignal(signal.SIGTERM)
    play(policy, {"kind": "single", "max_workers": 7}, "oak")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("args", "facts"),
    [
        ({"kind": "broken"}, ["InfraError"]),
        ({"reward": "broken"}, ["broken", "ValueError"]),
        ({"reward": "empty"}, ["empty", "TypeError"]),
        ({"kind": "group", "reward": "broken"}, ["broken", "ValueError"]),
        ({"reward": "best"}, ["group"]),
        ({"score_rollouts": False}, ["score_rollouts"]),
        ({"no_such_option": {}, "dataset": None, "eval_dataset": None}, ["ValueError"]),
    ],
)
def test_a_failure_names_the_environment_and_is_no_reward(
    policy: Policy, args: dict[str, Any], facts: list[str]
) -> None:
    with raises_error(WrappedError, "verifiers", NAME, *facts):
        play(policy, args, "oak")


def test_a_failed_call_is_no_reward(policy: Policy) -> None:
    with raises_error(WrappedError, NAME, "ModelError"):
        VerifiersV0(id=NAME).run({}, Session(base_url="http://127.0.0.1:9/v1", api_key="secret", seed=0))


def test_a_row_that_does_not_exist_is_named(policy: Policy) -> None:
    with raises_error(WrappedError, NAME, "3"):
        play(policy, {}, idx=3)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({}, ["id"]),
        ({"id": "no_such_words"}, ["id", "no_such_words"]),
        ({"id": "json"}, ["id", "json", "load_environment"]),
        ({"id": NAME, "split": "test"}, ["split", "train", "eval"]),
    ],
)
def test_mistakes_are_located(options: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        config.VerifiersV0Config(**options)
    text = "\n".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in caught.value.errors())
    assert mentions(text, *facts), text


def test_arguments_that_the_environment_has_not_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strict_words.py").write_text("def load_environment(*, level): ...\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for args, fact in (({"levels": 3}, "levels"), ({}, "level")):
        with pytest.raises(ValidationError, match=rf"args: .*{fact}"):
            config.VerifiersV0Config(id="strict_words", args=args)
    assert config.VerifiersV0Config(id="strict-words", args={"level": 3}).split == "train"


@pytest.mark.parametrize(("args", "turns"), [({}, 1), ({"kind": "turns"}, 2)], ids=["single", "turns"])
def test_an_environment_of_verifiers_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], turns: int
) -> None:
    """Two steps in processes. The rewards are those of the replies that were trained on."""
    monkeypatch.chdir(Path(__file__).parent)
    entry = {"agent": "verifiers_v0", "agent_config": {"id": NAME, "args": args}, "concurrency": 1}
    result = run(tmp_path, entry, max_steps=2)
    line = metrics(result)
    assert line["env/env/turns/mean"] == line["agent/env/calls/mean"] == turns
    assert line["rollout/forks"] == 0
    (file,) = result.run_dir.path.rglob("samples.jsonl")
    rows = [json.loads(each) for each in file.read_text(encoding="utf-8").splitlines()]
    assert rows
    for row in rows:
        assert row["reward"] == pytest.approx(2 * row["detail"]["says"] + 0.25 * row["detail"]["short"], abs=1e-5)


def test_call_beyond_a_limit_truncates_and_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    entry = {"agent": "verifiers_v0", "agent_config": {"id": NAME, "args": {"kind": "turns"}}, "concurrency": 1}
    line = metrics(run(tmp_path, entry, max_actions_per_traj=1))
    assert line["env/env/turns/mean"] == line["env/env/truncated_share"] == 1
    assert line.get("env/env/failures", 0) == 0
