"""`tools`: the public methods of a Python object are the policy's tools, as in TRL's `environment_factory`.

class Game:
    def reset(self, **row): ...            # returns the first message, or text to append to row["prompt"]
    def guess(self, number: int) -> str:   # a tool: its schema comes from type hints and the docstring
    def get_reward(self) -> float: ...     # or reward functions, which get the object as environments=[object]
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn
from roll_core.types import Reward
from roll_environments.targets import WrappedError, calls_to, load, wrapped
from roll_environments.tool_calls import (
    ToolCallError,
    as_text,
    assistant_message,
    correction,
    is_image,
    tool_calls,
    tool_turn,
    with_images,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Literal

    from roll_core.spec.environment import Message, Reply, Task
    from roll_environments.tool_calls import ToolCall

NOT_TOOLS = ("reset", "get_reward", "close")
"""Public methods that are not tools. TRL has no `close`."""


class PythonTools(Environment):
    """An object of the user. A reply without a tool call ends the episode.

    Differs from TRL: each episode has a new object, where TRL resets the objects of earlier ones; calls of coroutine
    methods run in the order of the reply, where TRL runs them after the plain ones; results that are no text, and
    errors, are JSON, where TRL has Python's `str` of them.
    """

    def __init__(
        self,
        *,
        target: str,
        options: Mapping[str, Any] | None = None,
        rewards: Sequence[str] = (),
        tool_errors: Literal["reply", "fail"] = "reply",
    ) -> None:
        self.target, self.options, self.rewards, self.tool_errors = target, dict(options or {}), rewards, tool_errors

    @override
    async def reset(self, task: Task, seed: int) -> Opening:
        with calls_to(self.target, "__init__"):
            self.object = load(self.target)(**self.options)
        with calls_to(self.object, "schemas of its tools"):
            self.tools = methods(self.object)
            schemas = [_schema(tool) for tool in self.tools.values()]
        self.row = dict(task)
        self.messages: list[Message] = list(_prompt(self.row.get("prompt")))
        arguments = dict(self.row)
        if _accepts(self.object.reset, "seed"):
            arguments.setdefault("seed", seed)
        with calls_to(self.object, "reset"):
            observation = await _result(self.object.reset(**arguments))
            if observation is not None and not isinstance(observation, str):
                raise TypeError(f"returned {type(observation).__name__}, expected a text or None")
        if observation:
            last = self.messages.pop() if self.messages else {"role": "user", "content": ""}
            self.messages.append({**last, "content": last["content"] + observation})
        if not self.messages:
            raise WrappedError(f"{self.target}: there is no prompt: neither reset nor the column prompt has a text")
        self.num_prompt = len(self.messages)
        return Opening(messages=list(self.messages), tools=schemas)

    @override
    async def step(self, reply: Reply) -> Turn:
        calls = list(tool_calls(reply))
        self.messages.append(assistant_message(reply))
        if not calls:
            return correction(reply) or Turn(done=True)
        turn = tool_turn(reply, [await self._run(call) for call in calls])
        self.messages.extend(turn.messages)
        return turn

    async def _run(self, call: ToolCall) -> tuple[Message, float]:
        """The result of a call, and 1 if it failed."""
        method = self.tools.get(call.name)
        try:
            if method is None:
                raise ToolCallError(f"there is no tool {call.name}; there are {', '.join(self.tools)}")
            arguments = call.arguments
            inspect.signature(method).bind(**arguments)
        except (ToolCallError, TypeError) as error:
            return call.error(error), 1.0
        try:
            result = await _result(method(**arguments))
            values = result if isinstance(result, list | tuple) and any(map(is_image, result)) else [result]
            return call.result(*with_images([value if is_image(value) else as_text(value) for value in values])), 0.0
        except Exception as error:  # user code
            if self.tool_errors == "reply":
                return call.error(error), 1.0
            raise wrapped(self.object, call.name, error) from error

    @override
    async def score(self) -> Reward | None:
        parts: dict[str, float] = {}
        if callable(get_reward := getattr(self.object, "get_reward", None)):
            with calls_to(self.object, "get_reward"):
                parts[type(self.object).__name__] = _number(await _result(get_reward()))
        columns = {key: [value] for key, value in self.row.items() if key != "prompt"}
        prompt, completion = self.messages[: self.num_prompt], self.messages[self.num_prompt :]
        for target in self.rewards:
            function = load(target)
            with calls_to(target, "reward"):
                values = await _result(
                    function(prompts=[prompt], completions=[completion], environments=[self.object], **columns)
                )
                if len(values) != 1:
                    raise ValueError(f"returned {len(values)} rewards for one episode")
                if values[0] is not None:
                    parts[function.__name__] = _number(values[0])
        return Reward(value=sum(parts.values()), detail=parts) if parts else None

    @override
    async def close(self) -> None:
        if callable(close := getattr(getattr(self, "object", None), "close", None)):
            with calls_to(self.object, "close"):
                await _result(close())


def methods(of: Any) -> dict[str, Callable[..., Any]]:
    """Public methods that are tools, by name."""
    members = inspect.getmembers(type(of), predicate=inspect.isfunction)
    return {name: getattr(of, name) for name, _ in members if not name.startswith("_") and name not in NOT_TOOLS}


def _schema(method: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    schema: dict[str, Any] = get_json_schema(method)
    return schema


def _prompt(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [dict(message) for message in value]


def _accepts(function: Callable[..., Any], name: str) -> bool:
    """True if a parameter has this name. Parameters of `**row` get columns only."""
    return name in inspect.signature(function).parameters


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _number(value: Any) -> float:
    if isinstance(value, bool | int | float):
        return float(value)
    raise TypeError(f"returned {type(value).__name__}, expected a number")
