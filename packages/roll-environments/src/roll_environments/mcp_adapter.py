"""`mcp`: the tools of an MCP server are the policy's tools. Each episode has a connection, and its own stdio server."""

from __future__ import annotations

import base64
import importlib
import os
import shutil
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn
from roll_core.types import Reward
from roll_environments.supervised import supervised
from roll_environments.targets import WrappedError, calls_to, described, load
from roll_environments.tool_calls import (
    ToolCallError,
    as_text,
    assistant_message,
    correction,
    tool_calls,
    tool_turn,
    with_images,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from roll_core.spec.environment import Message, Reply, Task
    from roll_environments.tool_calls import ToolCall

INVALID_PARAMS = -32602
"""JSON-RPC's code of a call with wrong arguments: a mistake of the model. Other codes are failures of the server."""


MAX_LINES, MAX_CHARACTERS = 40, 1000
"""Lines and characters of a server's standard error in the error of a failed start."""
CLOSE_S = 2.0
"""Seconds to wait for the end of a server's standard error. A process that the server left behind may keep it open."""


class McpServer(Environment):
    """A reply without a tool call ends the episode. `reset_tool` and `reward_tool` are hidden from the policy."""

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        prompt: str | None = None,
        tools: Sequence[str] = (),
        reset_tool: str | None = None,
        reward_tool: str | None = None,
        reward: str | None = None,
        images: bool = True,
    ) -> None:
        self.command, self.url, self.env, self.prompt = list(command), url, dict(env or {}), prompt
        self.tools, self.reset_tool, self.reward_tool, self.reward = tools, reset_tool, reward_tool, reward
        self.images = images
        self.what = f"MCP server {url or ' '.join(command)}"
        self.open: list[AbstractContextManager[Any]] = []
        self.stderr: _StandardError | None = None

    @override
    def reset(self, task: Task, seed: int) -> Opening:
        self.task = dict(task)
        try:
            self._connect()
        except Exception as error:  # a server of the user
            raise WrappedError(f"{self.what}: start: {self._reason(error)}") from error
        with calls_to(self.what, "tools/list"):
            listed = self._list_tools()
        hidden = {tool for tool in (self.reset_tool, self.reward_tool) if tool}
        if missing := sorted((hidden | set(self.tools)) - set(listed)):
            raise WrappedError(f"{self.what} has no tool {missing[0]}; it has {', '.join(listed)}")
        self.visible = {
            name: schema
            for name, schema in listed.items()
            if name not in hidden and (not self.tools or name in self.tools)
        }
        prompt = self.prompt if self.prompt is not None else self.task.get("prompt")
        messages: list[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
        )
        if self.reset_tool is not None:
            properties = listed[self.reset_tool].get("properties", {})
            arguments = {key: value for key, value in {"seed": seed, **self.task}.items() if key in properties}
            text, media = self._own_call(self.reset_tool, arguments)
            if text:
                messages.append({"role": "user", "content": text} | ({"media": media} if media else {}))
        if not messages:
            raise WrappedError(f"{self.what}: there is no prompt: set prompt, reset_tool, or a column prompt")
        self.messages = list(messages)
        return Opening(messages=messages, tools=[self.schemas[name] for name in self.visible])

    @override
    def step(self, reply: Reply) -> Turn:
        calls = list(tool_calls(reply))
        self.messages.append(assistant_message(reply))
        if not calls:
            return correction(reply) or Turn(done=True)
        turn = tool_turn(reply, [self._run(call) for call in calls])
        self.messages.extend(turn.messages)
        return turn

    @override
    def score(self) -> Reward | None:
        if self.reward_tool is not None:
            text, _ = self._own_call(self.reward_tool, {})
            with calls_to(self.what, self.reward_tool):
                return Reward(value=float(text))
        if self.reward is not None:
            function = load(self.reward)
            with calls_to(self.reward, "reward"):
                return Reward(value=float(function(task=self.task, messages=self.messages)))
        return None

    @override
    def close(self) -> None:
        try:
            while self.open:
                self.open.pop().__exit__(None, None, None)
        finally:
            if self.stderr is not None:
                self.stderr.close()

    def _connect(self) -> None:
        """Start an event loop in a thread, and on it the client, which starts the server."""
        mcp = importlib.import_module("mcp")
        from anyio.from_thread import start_blocking_portal

        server: Any = self.url
        if self.url is None:
            if shutil.which(self.command[0]) is None:
                raise FileNotFoundError(f"there is no program {self.command[0]}: name one that is on PATH")
            command = supervised(self.command)
            parameters = mcp.StdioServerParameters(command=command[0], args=command[1:], env=self.env)
            self.stderr = _StandardError()
            server = mcp.stdio_client(parameters, errlog=self.stderr.file)
        manager: AbstractContextManager[Any] = start_blocking_portal()
        self.portal = manager.__enter__()
        self.open.append(manager)
        client = self.portal.wrap_async_context_manager(mcp.Client(server))
        self.client = client.__enter__()
        self.open.append(client)

    def _reason(self, error: BaseException) -> str:
        """Why the server did not start: the first error of nested groups, and what the server wrote."""
        self.close()  # so that all of its standard error has arrived
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        written = self.stderr.tail() if self.stderr is not None else ""
        return f"{described(error)}{f'; the server wrote: {written}' if written else ''}"

    def _list_tools(self) -> dict[str, dict[str, Any]]:
        """Schemas of the parameters of all tools, by name."""
        tools, cursor = [], None
        while True:
            page = self.portal.call(lambda cursor=cursor: self.client.list_tools(cursor=cursor))
            tools.extend(page.tools)
            if (cursor := page.next_cursor) is None:
                break
        self.schemas = {
            tool.name: {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
            }
            for tool in tools
        }
        return {tool.name: tool.input_schema for tool in tools}

    def _call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, list[Any], bool]:
        """The content of a result, its images, and True if the tool reported an error."""
        with calls_to(self.what, f"tools/call {name}"):
            result = self.portal.call(self.client.call_tool, name, dict(arguments))
            failed = bool(result.is_error)
            values = [_value(block, images=self.images and not failed) for block in result.content]
            if not values and result.structured_content is not None:
                values = [as_text(result.structured_content)]
        return *with_images(values), failed

    def _own_call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, list[Any]]:
        text, media, failed = self._call(name, arguments)
        if failed:
            raise WrappedError(f"{self.what}: {name}: {text}")
        return text, media

    def _run(self, call: ToolCall) -> tuple[Message, float]:
        """The result of a call of the policy, and 1 if it failed."""
        try:
            if call.name not in self.visible:
                raise ToolCallError(f"there is no tool {call.name}; there are {', '.join(self.visible)}")
            text, media, failed = self._call(call.name, call.arguments)
        except ToolCallError as error:
            return call.error(error), 1.0
        except WrappedError as error:
            if getattr(getattr(error.__cause__, "error", None), "code", None) == INVALID_PARAMS:
                return call.error(error.__cause__), 1.0
            raise
        return (call.error(text), 1.0) if failed else (call.result(text, media), 0.0)


class _StandardError:
    """Passes on what a server writes to its standard error, and keeps the end of it."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self.file = os.fdopen(write, "w", encoding="utf-8")
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._thread = threading.Thread(target=self._pass_on, args=(read,), daemon=True)
        self._thread.start()

    def _pass_on(self, read: int) -> None:
        with os.fdopen(read, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._lines.append(line)
                sys.stderr.write(line)

    def close(self) -> None:
        """Close this process's end, and wait until the server's is closed as well."""
        self.file.close()
        self._thread.join(CLOSE_S)

    def tail(self) -> str:
        """The last lines, on one."""
        return " ".join("".join(self._lines).split())[-MAX_CHARACTERS:]


def _value(content: Any, *, images: bool) -> str | bytes:
    """A part of a result: the text, or the bytes of an image. The policy reads only the kind of a sound or a link, and
    of an image without `images`."""
    if content.type == "text":
        return str(content.text)
    resource = getattr(content, "resource", None)
    blob = content.data if content.type == "image" else getattr(resource, "blob", None)
    kind = str(getattr(content if content.type == "image" else resource, "mime_type", None))
    if images and blob is not None and kind.startswith("image/"):
        return base64.b64decode(blob)
    text = getattr(resource, "text", None)
    return f"[{content.type}]" if text is None else str(text)
