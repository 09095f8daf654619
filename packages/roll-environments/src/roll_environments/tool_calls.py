"""Tools as schemas and messages: what `Opening.tools` and `Reply.tool_calls` contain, in the format of OpenAI's API."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.spec.environment import Turn
from roll_core.spec.rollout import IMAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from roll_core.spec.environment import Message, Reply


class ToolCallError(ValueError):
    """A call of the model that cannot be run. The model gets the message."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in a reply."""

    id: str
    name: str
    text: str | Mapping[str, Any]
    """Arguments: an object, or its JSON text."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments by name. Raises `ToolCallError`."""
        try:
            arguments = json.loads(self.text) if isinstance(self.text, str) else dict(self.text)
        except ValueError as error:
            raise ToolCallError(f"the arguments are not JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ToolCallError("the arguments are not a JSON object")
        return arguments

    @property
    def readable(self) -> dict[str, Any] | str:
        """Arguments by name, or their text if it is no object."""
        try:
            return self.arguments
        except ToolCallError:
            return str(self.text)

    def result(self, content: str, media: Sequence[Any] = ()) -> Message:
        """The message with the result of this call, whose images are `media`."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": content} | (
            {"media": list(media)} if media else {}
        )

    def error(self, reason: object) -> Message:
        """The message about a call that failed."""
        return self.result(json.dumps({"error": str(reason)}))


def tool_calls(reply: Reply) -> Iterator[ToolCall]:
    """Calls of tools in a reply, in order."""
    for call in reply.tool_calls:
        function = call["function"]
        yield ToolCall(call.get("id") or "", function["name"], function.get("arguments") or {})


def assistant_message(reply: Reply) -> dict[str, Any]:
    """A reply as a message, with the arguments of its calls as objects."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.readable}}
            for call in tool_calls(reply)
        ]
    return message


def correction(reply: Reply, *, reward: float | None = None) -> Turn | None:
    """A turn that names the mistake of a reply whose only tool calls are malformed; None for other replies.

    `reward` is that of the turn. An environment without `score` must give one: an episode of malformed calls has no
    other reward, and an episode without a reward counts as a failure of the environment.
    """
    if reply.tool_calls or reply.parse_error is None:
        return None
    messages = [{"role": "user", "content": _malformed(reply)}]
    return Turn(messages=messages, reward=reward, metrics={"tool_errors": 1.0})


def tool_turn(reply: Reply, results: Sequence[tuple[Message, float]], *, reward: float | None = None) -> Turn:
    """The turn after the calls of a reply, with their messages and 1 for each call that failed.

    A malformed call beside them counts as failed. Its mistake follows the text of the last result, because not all chat
    templates accept a message of the user after results.
    """
    messages = [dict(message) for message, _ in results]
    failed = [number for _, number in results]
    if reply.parse_error is not None:
        messages[-1]["content"] += f"\n{_malformed(reply)}"
        failed.append(1.0)
    return Turn(messages=messages, reward=reward, metrics={"tool_errors": sum(failed) / len(failed)})


def _malformed(reply: Reply) -> str:
    return f"The tool call is malformed: {reply.parse_error}"


def tool_schema(name: str, description: str, parameters: Mapping[str, str], **optional: str) -> dict[str, Any]:
    """Schema of a tool whose parameters are texts. `parameters` and `optional` are descriptions by name."""
    properties = {key: {"type": "string", "description": value} for key, value in {**parameters, **optional}.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(parameters)},
        },
    }


def with_images(values: Sequence[Any]) -> tuple[str, list[Any]]:
    """The content of a message whose lines are texts and images, and its images."""
    images = [value for value in values if not isinstance(value, str)]
    if not images:
        return "\n".join(values), []
    # A text may contain the character of an image's place.
    lines = [value.replace(IMAGE, "\ufffd") if isinstance(value, str) else IMAGE for value in values]
    return "\n".join(lines), images


def is_image(value: Any) -> bool:
    """True for an image of Pillow."""
    return callable(getattr(value, "convert", None)) and hasattr(value, "getpixel")


def as_text(value: Any) -> str:
    """A result of a tool or an observation as text: texts as they are, other values as JSON if possible."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError):
        return str(value)


def _plain(value: Any) -> Any:
    """numpy's arrays and numbers, and pydantic's models, as JSON values."""
    for method in ("tolist", "model_dump"):
        if callable(convert := getattr(value, method, None)):
            return convert()
    return str(value)
