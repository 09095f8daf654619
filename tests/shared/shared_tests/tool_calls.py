"""Tool calls as chat templates write them, and how an engine's own parsers read them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

import pytest

from roll_pipeline_agentic.tool_calls import parse_tool_calls

DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|im_start|>", "<|im_end|>", "<|eom_id|>",
)  # fmt: skip
"""Tokens that engines' parsers look up in the vocabulary."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in parameters.items()}},
        },
    }
    for name, parameters in {"add": {"a": "integer", "b": "integer"}, "say": {"text": "string"}}.items()
]
CALLS: list[list[tuple[str, dict[str, Any]]]] = [
    [("add", {"a": 1, "b": -2})],
    [("say", {"text": 'größer "quoted" \\ {braces}'})],
    [("add", {"a": 1, "b": 2}), ("say", {"text": "two lines\nof text"})],
]
BROKEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 1}',
    "deepseek": DEEPSEEK.format("<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n{}<｜tool▁call▁end｜>"),
}
"""Malformed calls, which engines give back as text."""


def render(format: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Tool calls as the chat templates write them."""
    if format == "hermes":
        return "\n".join(
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': values})}\n</tool_call>" for name, values in calls
        )
    if format == "qwen3_coder":
        return "\n".join(
            f"<tool_call>\n<function={name}>\n"
            + "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in values.items())
            + "</function>\n</tool_call>"
            for name, values in calls
        )
    if format == "glm45":
        pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
        return "".join(
            f"\n<tool_call>{name}\n"
            + "".join(pair.format(key, bare(value)) for key, value in values.items())
            + "</tool_call>"
            for name, values in calls
        )
    if format == "llama3_json":
        return "; ".join(json.dumps({"name": name, "parameters": values}) for name, values in calls)
    if format == "mistral":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(values)}" for name, values in calls)
    if format == "mistral_list":  # of models before 2025
        return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": values} for name, values in calls])
    if format == "deepseek":
        return DEEPSEEK.format(
            "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(values)}\n```<｜tool▁call▁end｜>"
                for name, values in calls
            )
        )
    return "<|end|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(values)}"
        for name, values in calls
    )


def bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class EngineParserTests(ABC):
    """Our parser against an engine's, on the text that chat templates write."""

    @abstractmethod
    def engine_calls(self, format: str, text: str) -> list[tuple[str, Any]] | None:
        """Names and parsed arguments that the engine reads in the text. None if it has no parser of the format."""

    @pytest.mark.parametrize(
        "format", ["hermes", "qwen3_coder", "llama3_json", "mistral", "mistral_list", "deepseek", "glm45"]
    )
    @pytest.mark.parametrize("calls", CALLS, ids=["one", "text", "two"])
    def test_the_engine_reads_the_same_calls(self, format: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
        text = render(format, calls)
        theirs = self.engine_calls(format, text)
        if theirs is None:
            pytest.skip(f"the engine has no parser of {format}")
        ours = parse_tool_calls(text, format.removesuffix("_list"), tools=TOOLS)
        found = [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in ours.tool_calls]
        assert found == theirs == calls

    @pytest.mark.parametrize("format", BROKEN)
    def test_the_engine_finds_no_call_in_what_is_malformed_either(self, format: str) -> None:
        assert parse_tool_calls(BROKEN[format], format).tool_calls == []
        assert not self.engine_calls(format, BROKEN[format])
