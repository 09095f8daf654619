"""Replies of a model behind an OpenAI-compatible API, for `roll-core envs play --engine`."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections import defaultdict
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from typing_extensions import override

from roll_core.errors import RollError
from roll_core.runtime.cluster.concurrency import in_daemon_thread
from roll_core.spec.environment import Reply

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.environment import Message

TIMEOUT_S = 300.0
"""Maximum seconds of a request."""
MAX_REPLY = 4 << 20
"""Maximum bytes of a reply."""


class EngineError(RollError):
    """The server gives no reply, or one that is no chat completion. Names its URL."""


class _Function(BaseModel):
    name: str
    arguments: str


class _Call(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Message(BaseModel):
    content: str | None = None
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1)]


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(min_length=1)]


_Found = TypeVar("_Found", _Completion, _Models)


class _EveryStatus(urllib.request.HTTPErrorProcessor):
    """Returns replies of every status. Follows no redirect, which would send the key to another host."""

    @override
    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


class EnginePlayer:
    """The model of a server. Each player of a game has a conversation of its own."""

    def __init__(self, url: str, model: str = "") -> None:
        """`url` is the base URL of the API, such as `http://localhost:8000/v1`. Without `model`, the first it lists."""
        self._url, self._model = url.rstrip("/"), model
        self._conversations: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

    def add(self, messages: Sequence[Message], player: str) -> None:
        """Append messages of the environment to the conversation of a player."""
        self._conversations[player] += [dict(message) for message in messages]

    async def reply(self, tools: Sequence[Mapping[str, Any]], player: str) -> Reply:
        """The model's reply to the conversation of a player. Raises `EngineError`."""
        if not self._model:
            self._model = (await self._request("/models", None, _Models)).data[0].id
        conversation = self._conversations[player]
        body = {"model": self._model, "messages": conversation} | ({"tools": list(tools)} if tools else {})
        choice = (await self._request("/chat/completions", body, _Completion)).choices[0]
        message = choice.message
        text, calls = message.content or "", [call.model_dump() for call in message.tool_calls or ()]
        conversation.append({"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}))
        return Reply(
            text=text,
            tool_calls=calls,
            reasoning=message.reasoning_content or message.reasoning or "",
            finish_reason="length" if choice.finish_reason == "length" else "stop",
        )

    async def _request(self, path: str, body: Mapping[str, Any] | None, expected: type[_Found]) -> _Found:
        """The reply to a GET, or to a POST of `body`."""
        url = self._url + path
        try:
            async with asyncio.timeout(TIMEOUT_S):  # also of a server that sends a byte now and then
                status, payload = await in_daemon_thread(partial(_send, url, body), name="engine")
        except TimeoutError as error:
            raise EngineError(f"--engine {url}: no reply within {TIMEOUT_S:g} s") from error
        except (OSError, HTTPException, ValueError) as error:
            raise EngineError(f"--engine {url}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise EngineError(f"--engine {url}: status {status}: {payload[:300]!r}")
        try:
            return expected.model_validate_json(payload)
        except ValidationError as error:
            mistake = error.errors(include_url=False)[0]
            where = ".".join(map(str, mistake["loc"]))
            raise EngineError(
                f"--engine {url}: the reply is not OpenAI's: {where}{': ' if where else ''}{mistake['msg']},"
                f" found {payload[:300]!r}"
            ) from error


def _send(url: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
    """Status and body of the reply."""
    key = os.environ.get("OPENAI_API_KEY", "")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.build_opener(_EveryStatus).open(request, timeout=TIMEOUT_S) as reply:
        return reply.status, reply.read(MAX_REPLY)
