"""`openenv`: environments of OpenEnv, over the WebSocket of their server. Needs `websockets`, not `openenv`.

{"type": "reset", "data": {"seed": …}}     ►  {"type": "observation", "data": {"observation", "reward", "done"}}
{"type": "step", "data": ACTION}           ►  the same, or {"type": "error", "data": {"message", "code"}}
{"type": "close"}
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn
from roll_environments.supervised import supervised
from roll_environments.targets import WrappedError, calls_to
from roll_environments.tool_calls import ToolCallError, as_text, correction, tool_calls, tool_turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.environment import Message, Reply, Task
    from roll_environments.tool_calls import ToolCall

CONNECT_S = 0.1
"""Seconds between two attempts to connect to a server that starts."""
STOP_S = 5.0
"""Seconds that a server has to stop after SIGTERM."""
HIDDEN = ("metadata",)
"""Fields of observations that the policy does not see."""


class ServerError(RuntimeError):
    """An error message of the server."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.code = str(data.get("code", ""))
        super().__init__(f"{self.code}: {data.get('message', '')} {data.get('errors', '')}".rstrip())


class OpenEnv(Environment):
    """A session at a server: one that runs at `url`, or one that `command` starts for this episode."""

    def __init__(
        self,
        *,
        url: str | None = None,
        command: Sequence[str] = (),
        action: str | None = None,
        observation: str | None = None,
        tools: bool = False,
        reset: Mapping[str, Any] | None = None,
        prompt: str = "",
    ) -> None:
        self.url, self.command, self.action, self.observation = url, list(command), action, observation
        self.tools, self.reset_data, self.prompt = tools, dict(reset or {}), prompt
        self.what = f"OpenEnv server {url or ' '.join(command)}"
        self.server: subprocess.Popen[bytes] | None = None
        self.open = ExitStack()
        self.socket: Any = None

    @override
    def reset(self, task: Task, seed: int) -> Opening:
        with calls_to(self.what, "connect"):
            self._connect()
        with calls_to(self.what, "reset"):
            data = self._request("reset", {"seed": seed, **self.reset_data, **task})
            listed = self._request("step", {"type": "list_tools"})["observation"]["tools"] if self.tools else []
        prompt = self.prompt or task.get("prompt", "")
        text = "\n".join(part for part in (prompt, self._text(data["observation"])) if part)
        if not text:
            raise WrappedError(f"{self.what}: reset: there is no text: set prompt or observation")
        tools: list[dict[str, Any]] = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("input_schema") or tool.get("inputSchema") or {"type": "object"},
                },
            }
            for tool in listed
        ]
        self.names = [tool["name"] for tool in listed]
        self.called = False
        return Opening(messages=[{"role": "user", "content": text}], tools=tools)

    @override
    def step(self, reply: Reply) -> Turn:
        if calls := list(tool_calls(reply)) if self.tools else []:
            return self._call_tools(reply, calls)
        if self.action is None:
            # The server rewards calls. A policy that made none has no other reward.
            reward = None if self.called else 0.0
            return correction(reply, reward=reward) or Turn(reward=reward, done=True)
        if self.tools and (wrong := correction(reply, reward=0.0)):
            return wrong
        try:
            with calls_to(self.what, "step"):
                data = self._request("step", {self.action: reply.text})
        except WrappedError as error:
            if not isinstance(error.__cause__, ServerError) or error.__cause__.code != "VALIDATION_ERROR":
                raise
            text = f"This is no valid {self.action}."  # the value was a reply of the model
            return Turn(messages=[{"role": "user", "content": text}], reward=0.0, metrics={"valid": 0.0})
        done = bool(data.get("done"))
        messages = [] if done else [{"role": "user", "content": self._text(data["observation"])}]
        return Turn(messages=messages, reward=_number(data.get("reward")), done=done, metrics={"valid": 1.0})

    def _call_tools(self, reply: Reply, calls: Sequence[ToolCall]) -> Turn:
        results: list[tuple[Message, float]] = []
        rewards, done, reached = [], False, False
        for call in calls:
            try:
                if call.name not in self.names:
                    raise ToolCallError(f"there is no tool {call.name}; there are {', '.join(self.names)}")
                action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            except ToolCallError as error:
                results.append((call.error(error), 1.0))
                continue
            if done:  # an earlier call of this reply ended the episode
                break
            self.called = reached = True
            with calls_to(self.what, f"step: {call.name}"):
                data = self._request("step", action)
                observation = data["observation"]
            reward = _number(data.get("reward"))
            rewards += [] if reward is None else [reward]
            done = done or bool(data.get("done"))
            if error_of := observation.get("error"):
                results.append((call.error(error_of.get("message", error_of)), 1.0))
            else:
                results.append((call.result(_result_text(observation.get("result"))), 0.0))
        turn = tool_turn(reply, results, reward=sum(rewards, 0.0) if rewards or not reached else None)
        return replace(turn, done=done)

    @override
    def close(self) -> None:
        connection, self.socket = self.socket, None
        server, self.server = self.server, None
        try:
            with suppress(Exception):  # the server may be gone
                if connection is not None:
                    connection.send(json.dumps({"type": "close"}))
        finally:
            self.open.close()
            if server is not None:
                _stop(server)

    def _connect(self) -> None:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        url = self.url
        if url is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [word.replace("{port}", str(port)) for word in self.command]
            self.server = subprocess.Popen(supervised(command), stdin=subprocess.DEVNULL, start_new_session=True)
            url = f"http://127.0.0.1:{port}"
        address = url.rstrip("/").replace("http", "ws", 1) + "/ws"
        while True:
            try:
                self.socket = self.open.enter_context(connect(address, max_size=None, proxy=None, open_timeout=30.0))
                return
            except (OSError, WebSocketException):
                if self.server is None:
                    raise
                if (code := self.server.poll()) is not None:
                    raise RuntimeError(f"the server exited with code {code}") from None
                time.sleep(CONNECT_S)

    def _request(self, kind: str, data: Mapping[str, Any]) -> Any:
        self.socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(self.socket.recv())
        if reply["type"] == "error":
            raise ServerError(reply["data"])
        return reply["data"]

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self.observation is not None:
            with calls_to(self.what, f"observation: {self.observation}"):
                return as_text(observation[self.observation])
        shown = {key: value for key, value in observation.items() if key not in HIDDEN}
        return as_text(shown) if shown else ""


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Stop a server and all that it started."""
    for number, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(timeout=wait_s)


def _result_text(result: Any) -> str:
    """A tool's result as text. FastMCP's results have `data`, or a list of `content`."""
    if isinstance(result, dict):
        if result.get("data") is not None:
            return as_text(result["data"])
        if isinstance(result.get("content"), list):
            return "\n".join(str(block.get("text", "")) for block in result["content"])
    return as_text(result)


def _number(reward: Any) -> float | None:
    return None if reward is None else float(reward)
