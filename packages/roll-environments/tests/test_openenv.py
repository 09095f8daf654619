"""A real OpenEnv server process: episodes over its WebSocket, tools, failures, and nothing that survives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers_environments import call, called, end, free_port, pids, play, wait_for_port

from roll_core.spec.environment import Reply
from roll_environments.openenv_adapter import OpenEnv
from roll_environments.targets import WrappedError
from roll_testing import EnvironmentConformance
from roll_testing.errors import raises_error

pytestmark = pytest.mark.engine("openenv")
SERVER = str(Path(__file__).parent / "server_openenv.py")
COMMAND = [sys.executable, SERVER, "text", "{port}"]
TEXT: dict[str, Any] = {"action": "number", "observation": "hint"}


def start(kind: str, **env: str) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    server = subprocess.Popen([sys.executable, SERVER, kind, str(port)], env={**os.environ, **env})
    wait_for_port(port)
    return server, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def text_server() -> Iterator[str]:
    server, url = start("text")
    yield url
    server.kill()
    server.wait()


@pytest.fixture(scope="module")
def tool_server() -> Iterator[str]:
    server, url = start("tools")
    yield url
    server.kill()
    server.wait()


class TestNumbers(EnvironmentConformance):
    url = ""

    @pytest.fixture(autouse=True)
    def _server(self, text_server: str) -> None:
        type(self).url = text_server

    def create(self) -> OpenEnv:
        return OpenEnv(url=self.url, **TEXT)

    def create_failing(self) -> OpenEnv:
        return OpenEnv(url=f"http://127.0.0.1:{free_port()}", **TEXT)

    def replies(self, seed: int) -> Sequence[str]:
        return [str((seed + 1) % 8), str(seed % 8)]


def test_rewards_and_ends_are_those_of_the_server(text_server: str) -> None:
    environment = OpenEnv(url=text_server, prompt="Guess.", reset={"high": 32}, **TEXT)
    opening, turns, score = play(environment, ["3", "20", "14"], seed=14)
    assert opening.messages == [{"role": "user", "content": "Guess.\n0 to 31"}]
    assert [turn.messages[0]["content"] for turn in turns[:2]] == ["higher", "lower"]
    assert [(turn.reward, turn.done) for turn in turns] == [(0.0, False), (0.0, False), (1.0, True)]
    assert score is None


def test_a_reply_that_is_no_action_is_answered(text_server: str) -> None:
    _, turns, _ = play(OpenEnv(url=text_server, **TEXT), ["a number", "5"], seed=5)
    assert [(turn.metrics["valid"], turn.done) for turn in turns] == [(0.0, False), (1.0, True)]


def test_the_whole_observation_is_json(text_server: str) -> None:
    opening, _, _ = play(OpenEnv(url=text_server, action="number"), [])
    assert json.loads(opening.messages[0]["content"]) == {"hint": "0 to 7"}


def test_tools_are_listed_and_called(tool_server: str) -> None:
    environment = OpenEnv(url=tool_server, tools=True, prompt="Open the lock.")
    replies = [
        call("turn", number=1),
        call("shell"),
        call("turn", number=-1),
        call("turn", number="x"),
        call("turn", number=6),
    ]
    opening, turns, _ = play(environment, replies, seed=6)
    assert [each["function"]["name"] for each in opening.tools] == ["turn"]
    assert opening.tools[0]["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert [turn.metrics["tool_errors"] for turn in turns] == [0, 1, 1, 1, 0]
    assert turns[0].messages[0]["content"] == "closed"
    assert turns[4].messages[0]["content"] == "open"
    assert [(turn.reward, turn.done) for turn in turns] == [
        (0, False),
        (0, False),
        (0, False),
        (0, False),
        (1, True),
    ]


@pytest.mark.parametrize("reply", ["open", Reply(text="<tool_call>{", parse_error="the JSON ends")])
def test_an_episode_without_a_call_has_a_reward(tool_server: str, reply: Any) -> None:
    _, (turn,), score = play(OpenEnv(url=tool_server, tools=True, prompt="Open the lock."), [reply])
    assert (turn.reward, score) == (0.0, None)


@pytest.mark.parametrize("stage", ["reset", "step", "exit step"])
def test_a_failure_names_the_server_and_never_is_a_reward(stage: str) -> None:
    server, url = start("text", FAIL=stage)
    try:
        with raises_error(WrappedError, url, stage.split()[-1]):
            play(OpenEnv(url=url, **TEXT), ["7"])
    finally:
        server.kill()
        server.wait()


def test_a_server_that_does_not_run_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with raises_error(WrappedError, url):
        play(OpenEnv(url=url, **TEXT), [])


def test_a_server_that_exits_at_its_start_is_named() -> None:
    with raises_error(WrappedError, "exit(5)", "5"):
        play(OpenEnv(command=[sys.executable, "-c", "exit(5)"], **TEXT), [])


def test_close_ends_the_server_of_an_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    environment = OpenEnv(command=COMMAND, **TEXT)
    called(environment, "reset", {}, 5)
    assert called(environment, "step", Reply(text="5")).done
    found = pids(tmp_path / "pids")
    called(environment, "close")
    assert end(found)


DRIVER = """
import sys, time
from roll_environments.openenv_adapter import OpenEnv
environment = OpenEnv(command=sys.argv[1:], action="number", observation="hint")
environment.reset({}, 0)
time.sleep(600)
"""


def test_a_killed_environment_takes_its_server_with_it(tmp_path: Path) -> None:
    env = {**os.environ, "PIDS": str(tmp_path / "pids")}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, *COMMAND], env=env)
    found = pids(tmp_path / "pids")
    driver.kill()
    driver.wait()
    assert end(found)
