"""Requests and replies of OpenAI's chat completions and responses, and of Anthropic's messages.

Each dialect parses a request's body into a `ChatRequest`, renders replies, and renders them as server-sent events while
they are generated. Parameters that only change sampling are replaced by those of the run. Parameters
that the endpoint cannot honour are rejected.
"""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from typing_extensions import override

from roll_core.data.media import received_message
from roll_core.data.rows import IMAGE_PARTS
from roll_pipeline_agentic.recording import ChatRequest, RequestError
from roll_pipeline_agentic.tool_calls import SettledParts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from roll_core.spec.environment import Message
    from roll_pipeline_agentic.recording import ChatReply

Body = dict[str, Any]
Event = tuple[str, Any]
"""Name of a server-sent event, empty for none, and its data."""

BILLING_HEADER = "x-anthropic-billing-header:"
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "output_config",
)
"""Parameters that the run's own replace: the trainer computes logprobs for these only."""


Harmless: TypeAlias = "tuple[Any, ...] | Mapping[str, Harmless] | None"
"""Values of a parameter that the endpoint can honour or ignore: a list, those of each key of an object, or all."""


class Dialect(ABC):
    """API of an endpoint: reads its requests and writes its replies."""

    path: ClassVar[str]
    unsupported: ClassVar[Mapping[str, Harmless]]
    """Parameters that would change the reply in a way that the endpoint cannot, with the values that are harmless."""

    def parse(self, body: Any, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Convert a request's body. `conversations` are earlier ones by the id of their last reply."""
        if not isinstance(body, dict):
            raise RequestError(f"the body is {type(body).__name__}, expected a JSON object")
        for name, harmless in self.unsupported.items():
            if not _is_harmless(body.get(name), harmless):
                raise RequestError(f"{name} {body[name]!r:.80} is not supported by this endpoint", code="unsupported")
        try:
            return self._parse(body, conversations)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise RequestError(f"the request is malformed: {type(error).__name__}: {error}") from error

    @abstractmethod
    def _parse(self, body: Body, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest: ...

    @abstractmethod
    def reply(self, id: str, body: Body, replies: Sequence[ChatReply]) -> Body:
        """The body of the reply."""

    @abstractmethod
    def stream(self, id: str, body: Body) -> ReplyStream:
        """The server-sent events of a call."""

    def error(self, error: RequestError) -> Body:
        """The body of an error."""
        return {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.code or None}}


class ChatCompletions(Dialect):
    """OpenAI's Chat Completions API, `POST /v1/chat/completions`."""

    path = "/v1/chat/completions"
    unsupported: ClassVar[Mapping[str, Harmless]] = {
        "tool_choice": ("auto", "none"),
        "response_format": {"type": ("text",)},
        "logprobs": (False,),
        "top_logprobs": (0,),
        "audio": (),
        "functions": (),
        "prediction": (),
        "web_search_options": (),
    }

    @override
    def _parse(self, body: Body, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
        return ChatRequest(
            messages=tuple(_message(message) for message in body["messages"]),
            tools=() if body.get("tool_choice") == "none" else tuple(dict(tool) for tool in body.get("tools") or ()),
            n=_count(body.get("n"), "n") or 1,
            max_tokens=_count(body.get("max_completion_tokens") or body.get("max_tokens"), "max_tokens"),
            stop=_stop(body.get("stop"), "stop"),
            sampling=_sampling(body),
            stream=bool(body.get("stream")),
        )

    @override
    def reply(self, id: str, body: Body, replies: Sequence[ChatReply]) -> Body:
        choices = [
            {
                "index": index,
                "message": _outgoing(reply.message) | {"refusal": None},
                "finish_reason": reply.finish_reason,
                "logprobs": None,
            }
            for index, reply in enumerate(replies)
        ]
        return self.frame(id, body, "chat.completion") | {"choices": choices, "usage": _usage(replies)}

    @override
    def stream(self, id: str, body: Body) -> ReplyStream:
        return _ChatStream(self, id, body)

    def frame(self, id: str, body: Body, kind: str) -> Body:
        """Keys of a completion besides its choices."""
        return {"id": f"chatcmpl-{id}", "object": kind, "created": int(time.time()), "model": _model(body)}


class Responses(Dialect):
    """OpenAI's Responses API, `POST /v1/responses`."""

    path = "/v1/responses"
    unsupported: ClassVar[Mapping[str, Harmless]] = {
        "tool_choice": ("auto", "none"),
        "text": {"format": {"type": ("text",)}, "verbosity": None},
        "top_logprobs": (0,),
        "background": (False,),
        "conversation": (),
        "prompt": (),
    }

    @override
    def _parse(self, body: Body, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
        messages: list[Message] = []
        if previous := body.get("previous_response_id"):
            if previous not in conversations:
                raise RequestError(f"previous_response_id {previous!r} is no response of this rollout")
            messages += conversations[previous]
        content = body["input"]
        messages += _items([{"role": "user", "content": content}] if isinstance(content, str) else content)
        if body.get("instructions"):
            messages.insert(0, {"role": "system", "content": _text(body["instructions"])})
        tools = [_function_tool(tool) for tool in body.get("tools") or ()]
        return ChatRequest(
            messages=tuple(messages),
            tools=() if body.get("tool_choice") == "none" else tuple(tools),
            max_tokens=_count(body.get("max_output_tokens"), "max_output_tokens"),
            sampling=_sampling(body),
            stream=bool(body.get("stream")),
        )

    @override
    def reply(self, id: str, body: Body, replies: Sequence[ChatReply]) -> Body:
        (reply,) = replies
        message, cut = _outgoing(reply.message), reply.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        output: list[Body] = []
        if reasoning := message.get("reasoning_content"):
            output.append(_reasoning_item(id, reasoning))
        if message["content"] or not message.get("tool_calls"):
            output.append(_message_item(id, message["content"] or "", status))
        output += [_call_item(id, number, call) for number, call in enumerate(message.get("tool_calls", []))]
        usage = {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        }
        return self.frame(id, body) | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": usage,
        }

    @override
    def stream(self, id: str, body: Body) -> ReplyStream:
        return _ResponsesStream(self, id, body)

    def frame(self, id: str, body: Body) -> Body:
        """Keys of a response besides its output."""
        return {
            "id": f"resp_{id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": _model(body),
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "temperature": None,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": None,
        }


class Messages(Dialect):
    """Anthropic's Messages API, `POST /v1/messages`."""

    path = "/v1/messages"
    unsupported: ClassVar[Mapping[str, Harmless]] = {
        "tool_choice": {"type": ("auto", "none"), "disable_parallel_tool_use": None},
        "mcp_servers": ([],),
        "container": (),
        "output_config": {"effort": None},
        "output_format": (),
    }

    @override
    def _parse(self, body: Body, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
        messages: list[Message] = []
        if system := _system(body.get("system") or ""):
            messages.append({"role": "system", "content": system})
        for message in body["messages"]:
            messages += _blocks(message["role"], message["content"])
        tools = [
            _function_tool({**tool, "parameters": tool["input_schema"]} if "input_schema" in tool else tool)
            for tool in body.get("tools") or ()
        ]
        return ChatRequest(
            messages=tuple(messages),
            tools=() if (body.get("tool_choice") or {}).get("type") == "none" else tuple(tools),
            max_tokens=_count(body["max_tokens"], "max_tokens"),
            stop=_stop(body.get("stop_sequences"), "stop_sequences"),
            sampling=_sampling(body),
            stream=bool(body.get("stream")),
        )

    @override
    def reply(self, id: str, body: Body, replies: Sequence[ChatReply]) -> Body:
        (reply,) = replies
        message = _outgoing(reply.message)
        content: list[Body] = []
        if reasoning := message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        content += [_tool_use(call) for call in message.get("tool_calls", [])]
        reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reply.finish_reason]
        return {
            "id": f"msg_{id}",
            "type": "message",
            "role": "assistant",
            "model": _model(body),
            "content": content,
            "stop_reason": "stop_sequence" if reply.stop and reason == "end_turn" else reason,
            "stop_sequence": reply.stop,
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
        }

    @override
    def stream(self, id: str, body: Body) -> ReplyStream:
        return _MessagesStream(self, id, body)

    @override
    def error(self, error: RequestError) -> Body:
        return {"type": "error", "error": {"type": error.kind, "message": str(error)}}


DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Responses(), Messages())
"""All APIs of the endpoint."""


def _is_harmless(value: Any, harmless: Harmless) -> bool:
    if value is None or harmless is None:
        return True
    if isinstance(harmless, tuple):
        return value in harmless
    if not isinstance(value, dict):
        return False
    return all(_is_harmless(nested, harmless.get(key, ())) for key, nested in value.items())


# -- streams -----------------------------------------------------------------------------------------------------------


class ReplyStream(ABC):
    """Server-sent events of one call for one connection. Tool calls follow when their reply is complete."""

    def __init__(self, dialect: Any, id: str, body: Body) -> None:
        self._dialect, self._id, self._body = dialect, id, body
        self._sent: dict[int, SettledParts] = {}

    def progress(self, parts: Sequence[SettledParts]) -> Iterator[Event]:
        """Events for what the replies have more than before."""
        for index, part in enumerate(parts):
            before = self._sent.get(index, SettledParts("", ""))
            if part == before or not part.extends(before):
                continue
            if not self._sent:
                yield from self._begin()
            if index not in self._sent:
                yield from self._begin_reply(index)
            self._sent[index] = part
            for kind, new, old in (("reasoning", part.reasoning, before.reasoning), ("text", *part[1:], *before[1:])):
                if len(new) > len(old):
                    yield from self._delta(index, kind, new[len(old) :])

    def end(self, replies: Sequence[ChatReply]) -> Iterator[Event]:
        """Yield the events after the last `progress`."""
        parts = [
            SettledParts(reply.message.get("reasoning_content", ""), reply.message["content"]) for reply in replies
        ]
        yield from self.progress(parts)
        if not self._sent:
            yield from self._begin()
        for index, reply in enumerate(replies):
            if index not in self._sent:
                yield from self._begin_reply(index)
            yield from self._end_reply(index, reply)
        yield from self._end(replies)

    def failed(self, error: RequestError) -> Iterator[Event]:
        """The event of an error in the middle of the stream."""
        yield "error", self._dialect.error(error)

    def _begin(self) -> Iterator[Event]:
        yield from ()

    def _begin_reply(self, index: int) -> Iterator[Event]:
        yield from ()

    @abstractmethod
    def _delta(self, index: int, kind: str, text: str) -> Iterator[Event]:
        """More `reasoning` or `text`."""

    @abstractmethod
    def _end_reply(self, index: int, reply: ChatReply) -> Iterator[Event]: ...

    @abstractmethod
    def _end(self, replies: Sequence[ChatReply]) -> Iterator[Event]: ...


class _ChatStream(ReplyStream):
    def _chunk(self, index: int, delta: Body, finish: str | None = None) -> Event:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
        return "", self._frame() | {"choices": [choice]}

    def _frame(self) -> Body:
        return cast("Body", self._dialect.frame(self._id, self._body, "chat.completion.chunk"))

    @override
    def failed(self, error: RequestError) -> Iterator[Event]:
        yield "", self._dialect.error(error)

    @override
    def _begin_reply(self, index: int) -> Iterator[Event]:
        yield self._chunk(index, {"role": "assistant", "content": ""})

    @override
    def _delta(self, index: int, kind: str, text: str) -> Iterator[Event]:
        yield self._chunk(index, {"content" if kind == "text" else "reasoning_content": text})

    @override
    def _end_reply(self, index: int, reply: ChatReply) -> Iterator[Event]:
        for number, call in enumerate(_outgoing(reply.message).get("tool_calls", [])):
            yield self._chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield self._chunk(index, {}, reply.finish_reason)

    @override
    def _end(self, replies: Sequence[ChatReply]) -> Iterator[Event]:
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield "", self._frame() | {"choices": [], "usage": _usage(replies)}
        yield "", "[DONE]"


class _BlockStream(ReplyStream):
    """The stream of one reply whose reasoning, text and tool calls are blocks, one after the other."""

    def __init__(self, dialect: Any, id: str, body: Body) -> None:
        super().__init__(dialect, id, body)
        self._kind = self._text = ""
        """Kind and text of the open block."""
        self._index = -1
        """Number of the block."""
        self._number = 0
        """Number of the event."""

    def _event(self, kind: str, **data: Any) -> Event:
        self._number += 1
        return kind, {"type": kind, **data}

    @override
    def _delta(self, index: int, kind: str, text: str) -> Iterator[Event]:
        if kind != self._kind:
            yield from self._close()
            self._kind, self._text = kind, ""
            self._index += 1
            yield from self._open_block()
        self._text += text
        yield self._block_delta(text)

    def _close(self) -> Iterator[Event]:
        if self._kind:
            yield from self._close_block()
        self._kind = ""

    @abstractmethod
    def _open_block(self) -> Iterator[Event]: ...

    @abstractmethod
    def _block_delta(self, text: str) -> Event: ...

    @abstractmethod
    def _close_block(self) -> Iterator[Event]: ...

    @override
    def _end_reply(self, index: int, reply: ChatReply) -> Iterator[Event]:
        yield from self._close()
        for number, call in enumerate(_outgoing(reply.message).get("tool_calls", [])):
            self._index += 1
            yield from self._call_block(number, call)

    @abstractmethod
    def _call_block(self, number: int, call: Body) -> Iterator[Event]: ...


class _ResponsesStream(_BlockStream):
    @override
    def _event(self, kind: str, **data: Any) -> Event:
        kind, event = super()._event(kind, **data)
        return kind, event | {"sequence_number": self._number - 1}

    @override
    def failed(self, error: RequestError) -> Iterator[Event]:
        yield self._event("error", code=error.code or error.kind, message=str(error), param=None)

    @override
    def _begin(self) -> Iterator[Event]:
        begun = self._dialect.frame(self._id, self._body) | {"status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def _item(self, status: str) -> Body:
        """The open block with its text so far."""
        if self._kind == "reasoning":
            return _reasoning_item(self._id, self._text)
        return _message_item(self._id, self._text, status)

    @property
    def _at(self) -> Body:
        return {"output_index": self._index, "item_id": self._item("")["id"], "content_index": 0}

    @override
    def _open_block(self) -> Iterator[Event]:
        item = self._item("in_progress")
        (part,) = item["content"]
        yield self._event("response.output_item.added", output_index=self._index, item=item | {"content": []})
        yield self._event("response.content_part.added", part=part, **self._at)

    @override
    def _block_delta(self, text: str) -> Event:
        if self._kind == "reasoning":
            return self._event("response.reasoning_text.delta", delta=text, **self._at)
        return self._event("response.output_text.delta", delta=text, logprobs=[], **self._at)

    @override
    def _close_block(self) -> Iterator[Event]:
        item = self._item("completed")
        (part,) = item["content"]
        if self._kind == "reasoning":
            yield self._event("response.reasoning_text.done", text=self._text, **self._at)
        else:
            yield self._event("response.output_text.done", text=self._text, logprobs=[], **self._at)
        yield self._event("response.content_part.done", part=part, **self._at)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    @override
    def _call_block(self, number: int, call: Body) -> Iterator[Event]:
        item = _call_item(self._id, number, call)
        arguments, name = item["arguments"], item["name"]
        place = {"output_index": self._index, "item_id": item["id"]}
        yield self._event("response.output_item.added", output_index=self._index, item=item | {"arguments": ""})
        yield self._event("response.function_call_arguments.delta", delta=arguments, **place)
        yield self._event("response.function_call_arguments.done", arguments=arguments, name=name, **place)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    @override
    def _end(self, replies: Sequence[ChatReply]) -> Iterator[Event]:
        body = self._dialect.reply(self._id, self._body, replies)
        yield self._event(f"response.{body['status']}", response=body)


class _MessagesStream(_BlockStream):
    @override
    def _begin(self) -> Iterator[Event]:
        message = {"id": f"msg_{self._id}", "type": "message", "role": "assistant", "model": _model(self._body)}
        begun: Body = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": 0, "output_tokens": 0}  # the last event has the numbers
        yield self._event("message_start", message=message | begun | {"usage": usage})

    @property
    def _name(self) -> str:
        return "text" if self._kind == "text" else "thinking"

    @override
    def _open_block(self) -> Iterator[Event]:
        block = {"type": self._name, self._name: ""} | ({} if self._kind == "text" else {"signature": ""})
        yield self._event("content_block_start", index=self._index, content_block=block)

    @override
    def _block_delta(self, text: str) -> Event:
        delta = {"type": f"{self._name}_delta", self._name: text}
        return self._event("content_block_delta", index=self._index, delta=delta)

    @override
    def _close_block(self) -> Iterator[Event]:
        yield self._event("content_block_stop", index=self._index)

    @override
    def _call_block(self, number: int, call: Body) -> Iterator[Event]:
        block = _tool_use(call)
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield self._event("content_block_start", index=self._index, content_block=block | {"input": {}})
        yield self._event("content_block_delta", index=self._index, delta=delta)
        yield self._event("content_block_stop", index=self._index)

    @override
    def _end(self, replies: Sequence[ChatReply]) -> Iterator[Event]:
        body = self._dialect.reply(self._id, self._body, replies)
        end = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        yield self._event("message_delta", delta=end, usage=body["usage"])
        yield self._event("message_stop")


# -- messages ----------------------------------------------------------------------------------------------------------


def _message(source: Mapping[str, Any]) -> Message:
    """A message of a chat completion, without keys of the client's own."""
    role = {"developer": "system"}.get(source["role"], source["role"])
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"role {role!r}, expected system, developer, user, assistant or tool")
    content = source.get("content") or ""
    reads = role in ("user", "tool")
    message: dict[str, Any] = {"role": role, **(_with_images(content) if reads else {"content": _text(content)})}
    if source.get("tool_calls"):
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": _function(call["function"])}
            for call in source["tool_calls"]
        ]
    for key in ("tool_call_id", "name", "reasoning_content"):
        if source.get(key):
            message[key] = source[key]
    return message


def _items(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Items of the Responses API as messages. Adjacent items of one reply are one message."""
    messages: list[dict[str, Any]] = []

    def of_reply() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for item in items:
        kind = item.get("type", "message")
        if kind == "message" and item["role"] == "assistant":
            of_reply()["content"] += _text(item["content"])
        elif kind == "message":
            messages.append(dict(_message(item)))
        elif kind == "function_call":
            call = {"id": item["call_id"], "type": "function", "function": _function(item)}
            of_reply().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], **_with_images(item["output"])})
        elif kind != "reasoning":
            raise ValueError(f"items of type {kind!r} are not supported")
    return list(messages)


def _blocks(role: str, content: Any) -> list[Message]:
    """A message of the Anthropic API. Results of tools become messages of their own."""
    if role not in ("user", "assistant"):
        raise ValueError(f"role {role!r}, expected user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    parts, calls, results = [], [], []
    for block in content:
        kind = block["type"]
        if kind == "text" or (kind == "image" and role == "user"):
            parts.append(block)
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result":
            result = _with_images(block.get("content") or "")
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], **result})
        elif kind not in ("thinking", "redacted_thinking"):
            raise ValueError(f"content blocks of type {kind!r} are not supported")
    message: dict[str, Any] = {"role": role, **_with_images(parts)}
    if calls:
        message["tool_calls"] = calls
    return [*results, *([message] if parts or calls or not results else [])]


def _with_images(content: Any) -> Body:
    """Keys of a message: its text, with the places of its images, and its images as `media`. Raises `DataError`."""
    if isinstance(content, str):
        return {"content": content}
    parts = [
        _image_part(part) if part["type"] in IMAGE_PARTS else {"type": "text", "text": _text([part])}
        for part in content
    ]
    return dict(received_message({"content": parts}))


def _image_part(part: Mapping[str, Any]) -> Body:
    """An image as a part of its type, also that of the Anthropic API, whose key is `source`."""
    if not isinstance(source := part.get("source"), dict):
        return dict(part)
    return {"type": "image", "base64" if source["type"] == "base64" else "url": source.get("data") or source.get("url")}


def _text(content: Any) -> str:
    """Text of a content: a string, or parts of text."""
    if isinstance(content, str):
        return content
    for part in content:
        if part["type"] not in ("text", "input_text", "output_text"):
            raise ValueError(f"content parts of type {part['type']!r} are not supported")
    return "".join(part["text"] for part in content)


def _system(content: Any) -> str:
    """Text of a system message, without the header that Claude Code changes in each request.

    It is for Anthropic's accounts. With it, no conversation would continue an earlier one.
    """
    if isinstance(content, str):
        return re.sub(rf"\A{BILLING_HEADER}[^\n]*\n*", "", content)
    return _text([part for part in content if not str(part.get("text", "")).startswith(BILLING_HEADER)])


def _function_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with its schema at the top level, in the format of chat completions."""
    if "parameters" not in tool:
        raise RequestError(f"tool {tool.get('name', tool.get('type'))!r} is no function: the endpoint runs no tools")
    return {"type": "function", "function": _only(tool, "name", "description", "parameters")}


def _outgoing(message: Message) -> Body:
    """The message of a reply, as chat completions return it."""
    body: Body = {"role": "assistant", "content": message["content"]}
    if calls := message.get("tool_calls"):
        body["tool_calls"] = [
            {**call, "type": "function", "function": {**call["function"], "arguments": _json(call["function"])}}
            for call in calls
        ]
        body["content"] = message["content"] or None
    if reasoning := message.get("reasoning_content"):
        body["reasoning_content"] = reasoning
    return body


def _reasoning_item(id: str, text: str) -> Body:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{id}", "summary": [], "content": content}


def _message_item(id: str, text: str, status: str) -> Body:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": f"msg_{id}", "status": status, "role": "assistant", "content": content}


def _call_item(id: str, number: int, call: Body) -> Body:
    names = {"id": f"fc_{id}_{number}", "call_id": call["id"], "status": "completed"}
    return {"type": "function_call", **names, **call["function"]}


def _tool_use(call: Body) -> Body:
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _object(function)}


def _json(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _object(function: Mapping[str, Any]) -> Any:
    """Arguments as an object, as the Anthropic API requires."""
    try:
        arguments = json.loads(_json(function))
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": function["arguments"]}


def _function(source: Mapping[str, Any]) -> Body:
    """Name and arguments of a tool call in a request."""
    return {"name": source["name"], "arguments": source["arguments"]}


def _only(source: Mapping[str, Any], *names: str) -> Body:
    return {name: source[name] for name in names if source.get(name) is not None}


def _sampling(body: Body) -> Body:
    return {name: body[name] for name in SAMPLING if body.get(name) is not None}


def _count(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{name} is {value!r:.40}, expected a positive integer")
    return value


def _stop(value: Any, name: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) and value else list(value or ())
    if not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} is {value!r:.80}, expected texts that are not empty")
    return tuple(texts)


def _usage(replies: Sequence[ChatReply]) -> Body:
    prompt, sampled = replies[0].prompt_tokens, sum(reply.completion_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _model(body: Body) -> str:
    return str(body.get("model") or "policy")
