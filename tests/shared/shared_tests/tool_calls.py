"""Tool calls as chat templates write them, and how an engine's own parsers read them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar

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
    for name, parameters in {
        "add": {"a": "integer", "b": "integer"},
        "say": {"text": "string"},
        "put": {"items": "array", "options": "object"},
    }.items()
]
CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one": [("add", {"a": 1, "b": -2})],
    "text": [("say", {"text": 'größer "quoted" \\ {braces}'})],
    "two": [("add", {"a": 1, "b": 2}), ("say", {"text": "two lines\nof text"})],
    "unicode": [("say", {"text": "東京 🙂 e\u0301 \u2028 <b>"})],
    "nested": [("put", {"items": [1, [2, {"x": None}], "]}"], "options": {"deep": {"er": [True, 0.5, "{"]}}})],
    "three": [("add", {"a": 1, "b": 2}), ("put", {"items": [], "options": {}}), ("add", {"a": 3, "b": 4})],
}
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


FORMATS = ("hermes", "qwen3_coder", "llama3_json", "mistral", "mistral_list", "deepseek", "glm45")


class EngineParserTests(ABC):
    """Our parsers against an engine's, on the text that chat templates write."""

    reads_cut_calls: ClassVar[set[str]] = set()
    """Formats in which the engine returns a cut call with the arguments so far. Ours is text with a `parse_error`."""

    @abstractmethod
    def engine_reply(self, format: str, text: str) -> tuple[str, list[tuple[str, Any]]] | None:
        """Content, and names and parsed arguments of calls, that the engine reads in the text. None without a parser of
        the format."""

    @abstractmethod
    def engine_reasoning(self, text: str, *, open: bool) -> tuple[str, str]:
        """Reasoning and content that the engine reads in the text. `open`: the prompt ended with `<think>`."""

    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
    def test_the_engine_reads_the_same_calls(self, format: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
        self._check(format, render(format, calls), "", calls)

    @pytest.mark.parametrize("format", [each for each in FORMATS if each != "llama3_json"])
    def test_the_engine_reads_the_same_text_before_calls(self, format: str) -> None:
        self._check(format, f"I add them: ä.{render(format, CALLS['one'])}", "I add them: ä.", CALLS["one"])

    def _check(self, format: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
        theirs = self.engine_reply(format, text)
        if theirs is None:
            pytest.skip(f"the engine has no parser of {format}")
        ours = parse_tool_calls(text, format.removesuffix("_list"), tools=TOOLS)
        found = [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in ours.tool_calls]
        assert found == theirs[1] == calls
        assert ours.content.strip() == theirs[0].strip() == content

    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize("kept", [0.5, 0.9])
    def test_the_engine_finds_no_call_in_a_cut_one_either(self, format: str, kept: float) -> None:
        whole = render(format, CALLS["nested"])
        text = whole[: int(kept * len(whole))]
        ours = parse_tool_calls(text, format.removesuffix("_list"), tools=TOOLS)
        assert ours.tool_calls == []
        assert ours.error
        if format not in self.reads_cut_calls:
            assert not (self.engine_reply(format, text) or ("", []))[1]

    @pytest.mark.parametrize("format", BROKEN)
    def test_engine_finds_no_call_in_malformed_text(self, format: str) -> None:
        assert parse_tool_calls(BROKEN[format], format).tool_calls == []
        assert not (self.engine_reply(format, BROKEN[format]) or ("", []))[1]

    @pytest.mark.parametrize(
        ("text", "open"),
        [
            ("a\n</think>\n\n4", True),
            ("<think>a</think>4", True),
            ("never ends", True),
            ('ä 🙂 {"b": 1}\n\nc</think>d\n', True),
            ("<think>\na\n</think>\n\n4", False),
            ("<think>\n\n</think>\n\n4", False),
            ("4", False),
        ],
    )
    def test_reasoning_is_split_as_by_the_engine(self, text: str, open: bool) -> None:
        reasoning, content = self.engine_reasoning(text, open=open)
        ours = parse_tool_calls(text, "none", reasoning_open=open)
        assert (ours.reasoning.strip(), ours.content.strip()) == (reasoning.strip(), content.strip())
