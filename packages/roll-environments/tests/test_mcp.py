"""A real MCP server over stdio and HTTP: tools, rewards, failures, and nothing that survives an episode."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers_environments import call, called, end, free_port, pids, play, wait_for_port

from roll_core.data.media import received_message
from roll_core.spec.environment import Reply
from roll_core.spec.rollout import IMAGE
from roll_environments.mcp_adapter import McpServer
from roll_environments.targets import WrappedError
from roll_testing import EnvironmentConformance
from roll_testing.errors import mentions, raises_error

pytestmark = pytest.mark.engine("mcp")
SERVER = str(Path(__file__).parent / "server_mcp.py")
STDIO = [sys.executable, SERVER, "stdio"]
HIDDEN: dict[str, Any] = {"reset_tool": "begin", "reward_tool": "reward"}


class TestLock(EnvironmentConformance):
    timeout_s = 120.0
    seeds = (3, 14)

    def create(self) -> McpServer:
        return McpServer(command=STDIO, **HIDDEN)

    def create_failing(self) -> McpServer:
        return McpServer(command=STDIO, env={"FAIL": "reward"}, **HIDDEN)

    def replies(self, seed: int) -> Sequence[Reply | str]:
        return [call("turn", number=seed % 10), "done"]


def test_tools_are_listed_and_hidden_ones_are_not() -> None:
    opening, turns, score = play(
        McpServer(command=STDIO, tools=["turn"], **HIDDEN), [call("turn", number=7), "Done."], seed=7
    )
    (tool,) = opening.tools
    assert tool["function"]["name"] == "turn"
    assert tool["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert opening.messages == [{"role": "user", "content": "The number is 7."}]
    assert turns[0].messages == [{"role": "tool", "tool_call_id": "call00000", "name": "turn", "content": "open"}]
    assert turns[1].done
    assert score is not None
    assert score.value == 1


def test_images_of_results_are_passed_on() -> None:
    for images, content in ((True, f"Lock:\n{IMAGE}"), (False, "Lock:\n[image]")):
        environment = McpServer(command=STDIO, images=images, **HIDDEN)
        _, turns, _ = play(environment, [call("look"), "Done."], seed=7)
        message = received_message(turns[0].messages[0])
        assert (message["role"], message["content"]) == ("tool", content)
        pixels = [media.image().getpixel((0, 0)) for media in message.get("media", ())]
        assert pixels == [(7, 0, 0)] * images


def length(task: Any, messages: Any) -> float:
    return float(len(messages))


def test_a_function_rewards_the_messages() -> None:
    environment = McpServer(command=STDIO, prompt="Turn it.", tools=["turn"], reward="test_mcp:length")
    opening, _, score = play(environment, [call("turn", number=7), "Done."])
    assert opening.messages == [{"role": "user", "content": "Turn it."}]
    assert score is not None
    assert score.value == 4


@pytest.mark.parametrize(
    "reply", [call("turn", number=-1), call("turn", number="x"), call("turn"), call("reward"), call("shell")]
)
def test_mistakes_of_the_model_are_answered(reply: Reply) -> None:
    _, turns, _ = play(McpServer(command=STDIO, **HIDDEN), [reply])
    assert turns[0].metrics == {"tool_errors": 1.0}
    assert "error" in json.loads(turns[0].messages[0]["content"])


@pytest.mark.parametrize("stage", ["begin", "exit", "reward"])
def test_a_failure_names_the_server_and_never_is_a_reward(stage: str) -> None:
    with pytest.raises(WrappedError, match=rf"server_mcp\.py.*{'turn' if stage == 'exit' else stage}"):
        play(McpServer(command=STDIO, env={"FAIL": stage}, **HIDDEN), [call("turn", number=7), "Done."])


def test_a_command_that_does_not_start_is_named() -> None:
    with pytest.raises(WrappedError, match="no_such_command"):
        play(McpServer(command=["no_such_command"], **HIDDEN), [])


@pytest.mark.parametrize(
    ("code", "written"), [("import sys; sys.exit('no key of the service')", "key"), ("raise OSError('disk 7')", "disk")]
)
def test_a_server_that_exits_at_once_is_quoted(code: str, written: str) -> None:
    with raises_error(WrappedError, sys.executable, written):
        play(McpServer(command=[sys.executable, "-c", code], **HIDDEN), [])


def test_an_address_without_a_server_is_named() -> None:
    port = free_port()
    with pytest.raises(WrappedError) as caught:
        play(McpServer(url=f"http://127.0.0.1:{port}/mcp", **HIDDEN), [])
    assert mentions(str(caught.value), port)
    assert "ExceptionGroup" not in str(caught.value)


def test_a_missing_tool_is_named() -> None:
    with pytest.raises(WrappedError, match="score_it"):
        play(McpServer(command=STDIO, reward_tool="score_it"), [])


def test_close_ends_the_server_and_what_it_started(tmp_path: Path) -> None:
    environment = McpServer(command=STDIO, env={"PIDS": str(tmp_path / "pids")}, **HIDDEN)
    called(environment, "reset", {}, 0)
    found = pids(tmp_path / "pids")
    called(environment, "close")
    assert end(found)


DRIVER = """
import sys, time
from roll_environments.mcp_adapter import McpServer
environment = McpServer(command=sys.argv[2:], env={"PIDS": sys.argv[1]}, reset_tool="begin", reward_tool="reward")
environment.reset({}, 0)
time.sleep(600)
"""


def test_a_killed_environment_takes_its_server_with_it(tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path / "pids"), *STDIO])
    found = pids(tmp_path / "pids")
    driver.kill()
    driver.wait()
    assert end(found)


def test_episodes_share_a_server_over_http() -> None:
    port = free_port()
    server = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port)
        environment = McpServer(url=f"http://127.0.0.1:{port}/mcp", **HIDDEN)
        _, turns, score = play(environment, [call("turn", number=4), "Done."], seed=4)
        assert turns[0].messages[0]["content"] == "open"
        assert score is not None
        assert score.value == 1
    finally:
        server.kill()
        server.wait()
