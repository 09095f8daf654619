"""Agents in whole runs, and what fails a rollout."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from roll_core.errors import ConfigError, EnvironmentsFailedError, UnsupportedError
from roll_core.spec.agent import Session
from roll_pipeline_agentic.agents import CommandAgent

if TYPE_CHECKING:
    from conftest import AgenticRuns

AGENT = '''
import asyncio
import json
import os
import random
import sys
import time
import urllib.error
import urllib.request


def call(url, key, messages, **more):
    body = json.dumps({"model": "m", "messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        with error:
            raise RuntimeError(error.read().decode()) from None


def play(task, session, high: int = 9, turns: int = 2, fails: str = ""):
    """guess_number, with the environment inside of the agent."""
    if fails == "raises":
        raise ValueError("no such level")
    if fails == "silent":
        return 1.0
    if fails == "hangs":
        time.sleep(3600)
    number = random.Random(session.seed).randint(1, high)
    messages = [{"role": "user", "content": f"Guess a number from 1 to {high}."}]
    for _ in range(turns):
        reply = call(session.base_url, session.api_key, messages)
        digits = "".join(each for each in reply if each.isdigit())
        if digits == str(number):
            return 1.0
        if fails == "elsewhere":
            reply = "42 of another model"
        answer = "higher" if digits and int(digits) < number else "lower"
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]
    if fails == "no reward":
        return None
    return sum(map(ord, reply)) % 10 / 10


def stream(task, session):
    """Counts the pieces of a stream."""
    body = {"model": "m", "messages": [{"role": "user", "content": "go"}], "stream": True}
    headers = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{session.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return float(sum(b'"content": "' in line for line in response))


async def reply(task, session):
    """Writes the replies for an environment."""
    return await asyncio.to_thread(call, session.base_url, session.api_key, list(session.messages))


def stubborn(task, session):
    """Asks the policy once, and then repeats a reply of its own."""
    if len(session.messages) == 1:
        call(session.base_url, session.api_key, list(session.messages))
    return "0"


def length(prompt, response):
    return float(len(response))


if __name__ == "__main__":
    given = json.load(sys.stdin)
    text = call(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], given["messages"])
    print(text)
'''


@pytest.fixture
def own(runs: AgenticRuns, monkeypatch: pytest.MonkeyPatch) -> AgenticRuns:
    (runs.folder / "my_agent.py").write_text(AGENT, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "my_agent", raising=False)  # of another test
    monkeypatch.chdir(runs.folder)
    return runs


def entry(**given: Any) -> dict[str, Any]:
    return {"guess": {"agent": "my_agent:play", "isolation": "thread", **given}}


def test_an_agent_that_knows_only_the_endpoint_is_trained(own: AgenticRuns) -> None:
    result = own.ok(own.config(custom_envs=entry(agent_config={"high": 5})))
    first, _ = (line for line in own.metrics(result) if line["step"])
    assert first["actor/grad_norm"] > 0
    assert first["rollout/forks"] == 0
    assert 1 <= first["env/guess/turns/mean"] <= 2
    assert first["agent/guess/calls/mean"] == first["env/guess/turns/mean"]
    assert first["env/guess/score/mean"] == pytest.approx(first["score/mean"])
    assert first["env/guess/run_s/max"] > 0
    sample = own.samples(result)[0]
    assert sample["turns"][0]["context"] == "Guess a number from 1 to 5."
    assert sample["turns"][-1]["reward"] == pytest.approx(sample["reward"])


@pytest.mark.slow
def test_a_stream_of_a_run_has_several_pieces(own: AgenticRuns) -> None:
    """The engine reports tokens while it samples; a reply in one piece would have the opening and its text."""
    custom = {"talk": {"agent": "my_agent:stream", "isolation": "thread"}}
    config = own.config(custom_envs=custom, max_steps=1, response_length=180, max_tokens_per_step=180)
    config["actor_train"]["model_args"]["random_init"] |= {"num_hidden_layers": 12}
    result = own.ok(config)
    assert max(sample["reward"] for sample in own.samples(result)) > 3
    assert "agent/talk/incomplete" not in own.metrics(result)[0]


def test_agents_run_in_processes(own: AgenticRuns) -> None:
    given = entry(agent_config={"high": 5}, isolation="process", concurrency=2)
    (line,) = own.metrics(own.ok(own.config(custom_envs=given, max_steps=1)))
    assert line["agent/guess/calls/mean"] >= 1
    assert "env/guess/retries" not in line


@pytest.mark.parametrize(
    ("keys", "limits"), [({}, {}), ({"response_mask": {"turns": "last"}}, {"max_tokens_per_traj": 5})]
)
def test_an_environment_scores_the_replies_of_an_agent(
    own: AgenticRuns, keys: dict[str, Any], limits: dict[str, Any]
) -> None:
    """As if the policy itself had replied: the same seeds, the same turns."""
    environment = {"environment": "guess_number", "env_config": {"high": 9}, **keys}
    agent = {"agent": "my_agent:reply", "isolation": "inline"}
    played, alone = (
        own.metrics(
            own.ok(own.config(exp_name=name, custom_envs={"guess": environment | more}, max_steps=1, **limits))
        )[-1]
        for name, more in (("played", agent), ("alone", {}))
    )
    for name in ("score/mean", "env/guess/turns/mean", "tokens/generated", "tokens/trained", "actor/grad_norm"):
        assert played[name] == pytest.approx(alone[name], rel=1e-4), name


def test_agent_without_calls_ends_at_the_limit_of_turns(own: AgenticRuns) -> None:
    """The environment never ends, and the recorder counts one call."""
    given = {"environment": "guess_number", "env_config": {"step_penalty": 1.0}, "agent": "my_agent:stubborn"}
    custom = {"guess": {**given, "isolation": "thread", "max_steps": 4}}
    (line,) = own.metrics(own.ok(own.config(custom_envs=custom, max_steps=1)))
    assert line["env/guess/score/mean"] == -4
    assert line["env/guess/truncated_share"] == 1
    assert line["agent/guess/calls/mean"] == 1


def test_a_command_is_an_agent(own: AgenticRuns) -> None:
    command = {"command": [sys.executable, "-S", "my_agent.py"]}
    custom = {
        "guess": {"environment": "guess_number", "env_config": {"high": 9}, "agent": "command", "agent_config": command}
    }
    (line,) = own.metrics(own.ok(own.config(custom_envs=custom, max_steps=1, max_actions_per_traj=1)))
    assert line["agent/guess/calls/mean"] == 1
    assert line["env/guess/turns/max"] == 1


def test_rewards_score_what_an_agent_does_not(own: AgenticRuns) -> None:
    rewards = {"length": {"reward": "function", "function": "my_agent:length"}}
    given = {"custom_envs": entry(agent_config={"fails": "no reward", "high": 90}), "rewards": rewards}
    (line,) = own.metrics(own.ok(own.config(max_steps=1, adv_estimator="step_reinforce", **given)))
    assert line["score/max"] > 1
    assert line["actor/grad_norm"] > 0


@pytest.mark.parametrize("fails", ["raises", "silent", "elsewhere", "no reward", "hangs"])
def test_a_failed_rollout_is_never_a_reward(own: AgenticRuns, fails: str) -> None:
    config = {"fails": fails, "high": 90}
    given = entry(agent_config=config, max_retries=0, agent_timeout_s=0.5 if fails == "hangs" else 60)
    if fails == "hangs":
        given["guess"]["isolation"] = "process"
    result = own.run(own.config(custom_envs=given, max_consecutive_failures=3))
    assert isinstance(result.error, EnvironmentsFailedError)
    assert "my_agent:play" in str(result.error)


def test_a_command_that_hangs_is_killed_with_all_that_it_started(own: AgenticRuns) -> None:
    command = {"command": ["sh", "-c", "sleep 3599 & sleep 3598"]}
    given = {"guess": {"agent": "command", "agent_config": command, "agent_timeout_s": 0.3, "max_retries": 0}}
    result = own.run(own.config(custom_envs=given, max_consecutive_failures=3))
    assert isinstance(result.error, EnvironmentsFailedError)
    left = [each.cmdline() for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"]]
    assert not [each for each in left if each in (["sleep", "3598"], ["sleep", "3599"])]


def test_rewritten_replies_are_context_if_allowed(own: AgenticRuns) -> None:
    given = entry(agent_config={"fails": "elsewhere", "high": 90}, unrecorded_replies="allow")
    (line,) = own.metrics(own.ok(own.config(custom_envs=given, max_steps=1)))
    assert line["agent/guess/unrecorded_replies"] == 8
    assert line["rollout/forks"] == 8


def test_a_resumed_run_starts_agents_again_and_counts_them(own: AgenticRuns) -> None:
    given = {
        "is_use_additional_prompts": True,
        "max_additional_running_prompts": 2,
        "max_steps": 4,
        "save_steps": 2,
        "record_rollouts": True,
        "custom_envs": entry(agent_config={"high": 90}),
    }
    whole = own.ok(own.config(exp_name="whole", **given))
    checkpoint = whole.run_dir.checkpoints / "step-2"
    resumed = own.ok(own.config(exp_name="resumed", resume_from_checkpoint=str(checkpoint), **given))
    trained: list[str] = []
    for file in sorted((resumed.run_dir.path / "rollouts").glob("step-*.jsonl")):
        _, *groups = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        trained += [group["id"] for group in groups]
    assert trained == [f"guess/{position}" for position in range(8)]
    restarted = [line.get("rollout/restarted_groups", 0) for line in own.metrics(resumed)]
    assert max(restarted) > 0


def test_a_used_port_is_refused_before_a_model_is_built(own: AgenticRuns) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = own.run(own.config(custom_envs=entry(), agent_endpoint={"port": port}))
    assert isinstance(result.error, UnsupportedError)
    assert str(port) in str(result.error)
    assert not list(result.run_dir.path.glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"custom_envs": {"guess": {"max_steps": 2}}}, "custom_envs.guess"),
        ({"custom_envs": {"guess": {"agent": "comand"}}}, "custom_envs.guess.agent"),
        (
            {"custom_envs": {"guess": {"agent": "command", "agent_config": {}}}},
            "custom_envs.guess.agent_config.command",
        ),
        ({"custom_envs": entry(agent_config={"hig": 3})}, "custom_envs.guess.agent_config.hig"),
        ({"custom_envs": {"guess": {"agent": "my_agent:call"}}}, "custom_envs.guess.agent_config.messages"),
        ({"custom_envs": entry(), "echo_coef": 0.1}, "echo_coef"),
        ({"custom_envs": entry(), "agent_endpoint": {"host": "0.0.0.0"}}, "agent_endpoint.host"),
        ({"custom_envs": entry(), "agent_endpoint": {"url": "http://x:1"}}, "agent_endpoint.url"),
    ],
)
def test_mistakes_are_located(own: AgenticRuns, given: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        own.run(own.config(**given))
    (problem,) = error.value.problems
    assert key.startswith(problem.key)


@pytest.mark.parametrize("turns", range(1, 7))
def test_program_cancelled_twice_ends_and_closes_its_pipes(tmp_path, turns):
    started = tmp_path / "started"
    code = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    agent = CommandAgent(command=[sys.executable, "-c", code], env={})

    async def main():
        running = asyncio.create_task(agent.run({}, Session(base_url="http://127.0.0.1/v1", api_key="k", seed=0)))
        while not (started.is_file() and started.read_text()):
            await asyncio.sleep(0.01)
        running.cancel()
        for _ in range(turns):  # it kills the program and waits for its end
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not psutil.pid_exists(int(started.read_text()))

    asyncio.run(main())
    gc.collect()  # an open transport would warn, which is an error
