"""Replies with tool calls, episodes without a pipeline, and classes of a user."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

from roll_core.spec.environment import Opening, Reply, Turn
from roll_core.spec.rollout import IMAGE
from roll_core.types import Reward


def call(tool: str, *, id: str = "call00000", **arguments: Any) -> Reply:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return Reply(text="", tool_calls=[{"id": id, "type": "function", "function": function}])


def called(environment: Any, method: str, *arguments: Any) -> Any:
    """The result of a method, coroutine function or not."""
    result = getattr(environment, method)(*arguments)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def play(
    environment: Any, replies: list[str | Reply], *, seed: int = 0, task: dict[str, Any] | None = None
) -> tuple[Opening, list[Turn], Reward | None]:
    """A whole episode."""
    try:
        opening = called(environment, "reset", task or {}, seed)
        turns = []
        for each in replies:
            turns.append(called(environment, "step", each if isinstance(each, Reply) else Reply(text=each)))
            if turns[-1].done or turns[-1].truncated:
                break
        return opening, turns, called(environment, "score")
    finally:
        called(environment, "close")


class Counter:
    """An environment as a user of TRL writes it."""

    def reset(self, prompt: Any = None, goal: int = 3, **row: Any) -> str:
        self.goal, self.count = goal, 0
        return f" Count to {self.goal}."

    def add(self, number: int) -> int:
        """
        Add a number to the count.

        Args:
            number: The number to add.

        Returns:
            The new count.
        """
        if number < 0:
            raise ValueError("only forward")
        self.count += number
        return self.count

    async def undo(self) -> str:
        """
        Set the count to 0.

        Returns:
            The word done.
        """
        self.count = 0
        return "done"

    def get_reward(self) -> float:
        return float(self.count == self.goal)

    def _secret(self) -> None:
        pass


class Silent(Counter):
    """Without a reward of its own."""

    get_reward = None  # type: ignore[assignment]


class Painter(Counter):
    """Its tools return images, alone and beside texts."""

    def paint(self) -> Any:
        """Paint."""
        return Image.new("RGB", (4, 2), (self.goal, 0, 0))

    def describe(self) -> Any:
        """Describe."""
        return [f"a{IMAGE}b", self.paint(), 3]


def closeness(prompts: Any, completions: Any, environments: Any, goal: Any, **columns: Any) -> list[float]:
    """A reward function as TRL calls it."""
    assert len(prompts) == len(completions) == len(environments) == len(goal) == 1
    assert completions[0][0]["tool_calls"][0]["function"]["arguments"] == {"number": 4}
    return [0.5 * len(completions[0]) + environments[0].count / goal[0]]


class Faulty:
    """Raises in one stage."""

    def __init__(self, at: str = "") -> None:
        self.at = at
        self._fail("init")

    def _fail(self, stage: str) -> None:
        if stage == self.at:
            raise ValueError("no such level")

    def reset(self, **row: Any) -> str:
        self._fail("reset")
        return "go"

    def act(self) -> str:
        """
        Act.

        Returns:
            Nothing.
        """
        self._fail("act")
        return ""

    def get_reward(self) -> float:
        self._fail("reward")
        return 1.0


class Policy:
    """An endpoint whose replies are given. Keeps the requests."""

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        policy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                policy.requests.append({**body, "key": self.headers["Authorization"]})
                reply = policy.replies[len(policy.requests) - 1]
                message = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
                reason = "tool_calls" if message.get("tool_calls") else "stop"
                choice = {"index": 0, "message": message, "finish_reason": reason}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                found = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
                data = json.dumps(found | {"usage": usage}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def given(self, *replies: Any) -> None:
        self.replies, self.requests = list(replies), []


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for_port(port: int) -> None:
    limit = time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        assert time.monotonic() < limit
        time.sleep(0.1)


def pids(file: Path) -> list[int]:
    limit = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < limit
        time.sleep(0.05)
    return [int(each) for each in file.read_text().split()]


def end(numbers: list[int]) -> bool:
    """True if all processes end within a while."""
    limit = time.monotonic() + 30
    while living := [each for each in numbers if psutil.pid_exists(each) and psutil.Process(each).status() != "zombie"]:
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return not living
