"""Parsing of replies: tool calls in the formats of chat templates, and reasoning."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_core.data.reasoning import MARKS
from roll_pipeline_agentic.tool_calls import (
    TOOL_FORMATS,
    SettledParts,
    parse_tool_calls,
    settled_parts,
    spans_of_parts,
    tool_format_of,
    without_reasoning,
)
from shared_tests.tool_calls import DEEPSEEK, render

FORMATS = [each for each in TOOL_FORMATS if each != "none"]
ALL_MARKS = (*MARKS, *MARKS.values())
FRAGMENTS = [
    "<think>", "</think>", "[THINK]", "[/THINK]",
    "<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|python_tag|>",
    "<|start|>assistant", "<|channel|>analysis", "<|message|>", "<|call|>", "<|end|>", " to=functions.add", "{", "}",
    '{"name": "add", "arguments": {"a": 1}}', '"name"', ":", '"parameters"', "[", "]", "NaN", "1e999", "\\ud800",
    "```json", "\n", ";", ",", "add", "9" * 5000, "[" * 3000,
]  # fmt: skip
"""Parts of all formats, in any order."""


def named(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    assert all(set(each) == {"id", "type", "function"} and each["type"] == "function" for each in calls)
    return [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls]


@pytest.mark.parametrize("format", FORMATS)
def test_calls_come_back_as_the_template_wrote_them(format: str) -> None:
    calls = [("add", {"a": 1, "b": [2.5, None]}), ("say", {"text": "größer"}), ("stop", {})]
    parsed = parse_tool_calls(render(format, calls), format)
    assert named(parsed.tool_calls) == calls
    assert (parsed.content, parsed.reasoning, parsed.error) == ("", "", None)
    assert [each["id"] for each in parsed.tool_calls] == ["call00000", "call00001", "call00002"]


words = st.text("abc xyzäß-_.:0123456789", min_size=1).map(str.strip).filter(bool)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
some_calls = st.lists(
    st.tuples(
        st.from_regex(r"[a-z_]{1,12}", fullmatch=True), st.dictionaries(words.filter(str.isalpha), values, max_size=3)
    ),
    min_size=1,
    max_size=3,
)


@given(format=st.sampled_from(FORMATS), calls=some_calls, thought=words)
def test_any_calls_come_back(format: str, calls: list[tuple[str, dict[str, Any]]], thought: str) -> None:
    strings = {name: {key for key, value in each.items() if isinstance(value, str)} for name, each in calls}
    if format in ("qwen3_coder", "glm45"):  # a parameter has one type in all calls of a tool
        calls = [
            (name, {key: value for key, value in each.items() if isinstance(value, str) == (key in strings[name])})
            for name, each in calls
        ]
    tools = [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"properties": {key: {"type": "string"} for key in keys}}},
        }
        for name, keys in strings.items()
    ]
    text = render(format, calls)
    if format == "harmony":
        text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{text}"
    else:
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    parsed = parse_tool_calls(text, format, tools=tools)
    assert named(parsed.tool_calls) == calls
    assert (parsed.reasoning, parsed.error) == (thought, None)


@given(
    format=st.sampled_from(TOOL_FORMATS),
    parts=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=12),
    opened=st.booleans(),
)
def test_no_reply_raises(format: str, parts: list[str], opened: bool) -> None:
    parsed = parse_tool_calls("".join(parts), format, reasoning_open=opened)
    for call in parsed.tool_calls:
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
        call["function"]["arguments"].encode()
        assert call["function"]["name"]


@given(
    format=st.sampled_from(TOOL_FORMATS),
    parts=st.lists(st.sampled_from([each for each in FRAGMENTS if len(each) < 99]) | st.text(max_size=5), max_size=8),
    begin=st.sampled_from(["", "<think>", "[THINK]", "\n<think>\na</think>\n\n", "<|channel|>final<|message|>"]),
    opened=st.booleans(),
)
def test_streamed_parts_begin_the_reply(format: str, parts: list[str], begin: str, opened: bool) -> None:
    text = begin + "".join(parts)
    parsed = parse_tool_calls(text, format, reasoning_open=opened)
    whole = SettledParts(parsed.reasoning, parsed.content)
    begins = text.lstrip().startswith(tuple(MARKS))
    if format != "harmony" and not opened and not begins and any(end in text for end in MARKS.values()):
        return  # the end of reasoning that never began
    for end in range(len(text) + 1):
        found = settled_parts(text[:end], format, reasoning_open=opened)
        assert whole.extends(found), text[:end]


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_a_stream_holds_little_back(format: str) -> None:
    """All but a few characters of plain text, and all reasoning."""
    begin = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>"
    begin = begin if format == "harmony" else "<think>{}</think>"
    reasoning, content = "add one and two\nthen three", "The sum is\n\n6 < 7"
    found = settled_parts(begin.partition("{}")[0] + reasoning, format)
    assert found == (reasoning, "")
    assert settled_parts(begin.format(reasoning) + content + " or", format) == (reasoning, content + " or")
    assert settled_parts(begin.format(reasoning) + content + " or STO", format, stop=("STOP",)).content.endswith("or ")
    assert settled_parts(begin.format(reasoning) + "é\ufffd", format).content == "é"


@given(
    text=st.text().filter(lambda text: "{" not in text and not any(mark in text for mark in ALL_MARKS)),
    format=st.sampled_from(FORMATS),
)
def test_plain_text_is_content(text: str, format: str) -> None:
    assert parse_tool_calls(text, format) == (text, [], "", None)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "add", "argum'),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>add(1)</tool_call>"),
        ("glm45", "<tool_call>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>"),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}'),
        ("llama3_json", '<|python_tag|>{"add": 1}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}'),
        ("mistral", "[TOOL_CALLS]"),
        ("deepseek", DEEPSEEK.format("<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n{}<｜tool▁call▁end｜>")),
        ("deepseek", DEEPSEEK.format("<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>")),
        ("harmony", "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"),
        ("harmony", "<|channel|>analysis to=python code<|message|>{}"),
        ("harmony", "<|channel|>commentary to=browser.search <|constrain|>json<|message|>{}<|call|>"),
        ("hermes", '<tool_call>{"name": "add", "args": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}, "parameters": {"a": 1}}</tool_call>'),
        ("hermes", '{"name": "add", "arguments": {"a": 1}}</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "input": {"a": 1}}]'),
        ("mistral", 'add[ARGS]{"a": 1}'),
        ("llama3_json", '{"name": "add", "args": {"a": 1}}'),
        ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>1<parameter=b>2</parameter></function></tool_call>",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        ),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></function>"),
        (
            "glm45",
            "<tool_call>f<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
        ),
        ("glm45", "f<arg_key>a</arg_key><arg_value>1</arg_value>"),
    ],
)
def test_a_malformed_call_is_text_with_a_reason(format: str, text: str) -> None:
    parsed = parse_tool_calls(text, format)
    assert parsed.tool_calls == []
    assert parsed.content == text
    assert parsed.error


def test_a_malformed_call_beside_a_good_one_stays_in_the_content() -> None:
    good, bad = '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "<tool_call>add</tool_call>"
    parsed = parse_tool_calls(f"first {good}\n{bad}", "hermes")
    assert named(parsed.tool_calls) == [("add", {})]
    assert parsed.content == f"first \n{bad}"
    assert parsed.error


def test_the_lines_between_text_and_a_call_belong_to_neither() -> None:
    text = "I add.\n" + render("hermes", [("add", {}), ("add", {})])
    assert parse_tool_calls(text, "hermes").content == "I add."


def test_other_shapes_that_models_write() -> None:
    for format, text in (
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]x[ARGS]{"a": 2}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]'),
        ("mistral", '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]add{"a": 2}'),
        ("llama3_json", '<|python_tag|>{"name": "add", "arguments": {"a": 1}}\n'
                        '{"name": "add", "parameters": {"a": 2}}'),
        ("deepseek", DEEPSEEK.format("".join(
            f'<｜tool▁call▁begin｜>add<｜tool▁sep｜>{{"a": {a}}}<｜tool▁call▁end｜>' for a in (1, 2)))),
        ("harmony", '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
                    '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
                   '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>'
                   '<tool_call>{"type": "function", "name": "add", "parameters": {"a": 2}}</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "parameters": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]'),
        ("harmony", '<|channel|>commentary to=add <|constrain|>json<|message|>{"a": 1}<|call|>'
                    '<|start|>assistant<|channel|>analysis to=add code<|message|>{"a": 2}<|call|>'),
    ):  # fmt: skip
        parsed = parse_tool_calls(text, format, tools=[{"name": "add"}])
        assert named(parsed.tool_calls) == [("add", {"a": 1}), ("add", {"a": 2})], text
        assert not parsed.error


def test_a_reply_in_json_is_no_call() -> None:
    assert parse_tool_calls('{"answer": 3}', "llama3_json") == ('{"answer": 3}', [], "", None)


@pytest.mark.parametrize(
    ("text", "opened", "content", "reasoning", "malformed"),
    [
        ("<think>\na\n</think>\n\n4", False, "4", "a", False),
        ("a\n</think>\n\n4", True, "4", "a", False),
        ("a\n</think>\n\n4", False, "4", "a", False),
        ("<think>a</think>4", True, "4", "a", False),
        ("<think>\n\n</think>\n\n4", False, "4", "", False),
        ("<think>never ends", False, "", "never ends", True),
        ("never ends", True, "", "never ends", True),
        ("4 <think>a</think>", False, "4 <think>a</think>", "", False),
        ("4", False, "4", "", False),
        ("[THINK]a <think>b</think>[/THINK]4", False, "4", "a <think>b</think>", False),
        ("a[/THINK]4", True, "4", "a", False),
        ("[THINK]never ends</think>", False, "", "never ends</think>", True),
        ("<seed:think>a</seed:think>\n4 [/THINK]", False, "4 [/THINK]", "a", False),
        ("4 [THINK]a[/THINK]", False, "4 [THINK]a[/THINK]", "", False),
    ],
)
def test_reasoning_is_what_precedes_the_reply(
    text: str, opened: bool, content: str, reasoning: str, malformed: bool
) -> None:
    parsed = parse_tool_calls(text, "hermes", reasoning_open=opened)
    assert (parsed.content, parsed.reasoning, bool(parsed.error)) == (content, reasoning, malformed)


def test_a_call_inside_the_reasoning_is_no_call() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert parse_tool_calls(f"<think>maybe {call}</think>no", "hermes").tool_calls == []


def test_a_string_parameter_is_literal_where_the_schema_says_so() -> None:
    tools = [{"type": "function", "function": {"name": "say", "parameters": {"properties": {"a": {"type": "string"}}}}}]
    for format in ("qwen3_coder", "glm45"):
        text = render(format, [("say", {"a": "12", "b": 12})])
        assert named(parse_tool_calls(text, format, tools=tools).tool_calls) == [("say", {"a": "12", "b": 12})]
        assert named(parse_tool_calls(text, format).tool_calls) == [("say", {"a": 12, "b": 12})]


def test_ids_count_on() -> None:
    parsed = parse_tool_calls(render("hermes", [("add", {})]), "hermes", first_id=7)
    assert parsed.tool_calls[0]["id"] == "call00007"


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(ValueError, match="xml"):
        parse_tool_calls("", "xml")


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (None, "none"),
        ("{{ messages }}", "none"),
        ("<tool_call>{{ x | tojson }}</tool_call>", "hermes"),
        ("<tool_call>\n<function=", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek"),
        ('<|start_header_id|> {"name": function name, "parameters": …}', "llama3_json"),
        ("<|start|>assistant<|channel|>", "harmony"),
    ],
)
def test_the_format_is_read_off_the_template(template: str | None, format: str) -> None:
    assert tool_format_of(template) == format


def test_reasoning_is_removed_with_its_white_space() -> None:
    assert without_reasoning("assistant\n<think>\na\n</think>\n\n4<think>b</think>5") == "assistant45"
    assert without_reasoning("assistant [THINK]a</think>[/THINK] 4 <think>b[/THINK]</think>5") == "assistant45"
    assert without_reasoning("a[/THINK]4[THINK]b", reasoning_open=True) == "4"


# -- parts -------------------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BLOCK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


@pytest.mark.parametrize(
    ("format", "opened", "parts"),
    [
        ("none", False, [("content", f"2 {CALL}")]),
        ("hermes", False, [("content", "")]),
        ("hermes", False, [("reasoning", "<think>\nAdd.\n</think>\n\n"), ("content", "2")]),
        ("hermes", True, [("reasoning", "Add.\n</think>\n\n"), ("tool_calls", CALL), ("tool_calls", f"\n{CALL}\n")]),
        ("hermes", False, [("content", "I add.\n"), ("tool_calls", CALL), ("content", "\nDone.")]),
        ("hermes", False, [("content", "<tool_call>{</tool_call>"), ("tool_calls", CALL), ("content", "<tool_call>")]),
        ("hermes", False, [("reasoning", "<think> no end")]),
        ("qwen3_coder", False, [("tool_calls", "<tool_call>\n<function=add>\n</function>\n</tool_call>")]),
        ("glm45", False, [("content", "I add.\n"), ("tool_calls", "<tool_call>add\n</tool_call>")]),
        ("llama3_json", False, [("tool_calls", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}')]),
        ("llama3_json", False, [("content", '{"name": "add", "parameters": ')]),
        ("mistral", False, [("content", "I add."), ("tool_calls", "[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]b[ARGS]{}")]),
        ("mistral", False, [("content", "[TOOL_CALLS]add[ARGS]{")]),
        ("deepseek", True, [("reasoning", "Add.</think>"), ("content", "I add."), ("tool_calls", BLOCK)]),
        ("deepseek", False, [("content", BLOCK.replace("{}", "{"))]),
        (
            "harmony",
            False,
            [
                ("reasoning", "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant"),
                ("content", "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"),
                ("tool_calls", "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>"),
            ],
        ),
    ],
)  # fmt: skip
def test_parts_have_spans(format: str, opened: bool, parts: list[tuple[str, str]]) -> None:
    text = "".join(each for _, each in parts)
    found = spans_of_parts(text, format, reasoning_open=opened)
    assert [(part, text[begin:end]) for begin, end, part in found] == parts


@given(
    parts=st.lists(st.sampled_from([each for each in FRAGMENTS if len(each) < 99]) | st.text(max_size=5), max_size=8),
    format=st.sampled_from(TOOL_FORMATS),
    opened=st.booleans(),
)
def test_spans_cover_any_text_and_name_what_the_parser_finds(parts: list[str], format: str, opened: bool) -> None:
    text = "".join(parts)
    spans = spans_of_parts(text, format, reasoning_open=opened)
    assert [begin for begin, _, _ in spans] == [0, *(end for _, end, _ in spans[:-1])]
    assert spans[-1][1] == len(text)
    parsed = parse_tool_calls(text, format, reasoning_open=opened)
    assert ("tool_calls" in {part for *_, part in spans}) == bool(parsed.tool_calls)
    assert not parsed.reasoning or "reasoning" in {part for *_, part in spans}


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("glm45", f"<tool_call>f{'<arg_key>a</arg_key><arg_value>' * 3000}</tool_call>"),
        ("qwen3_coder", f"<tool_call><function=f>{'<parameter=a>' * 6000}</function></tool_call>"),
    ],
)
def test_a_reply_that_repeats_a_tag_is_parsed_in_linear_time(format: str, text: str) -> None:
    begin = time.monotonic()
    found = parse_tool_calls(text, format)
    assert (found.content, found.tool_calls) == (text, [])
    assert found.error
    assert time.monotonic() - begin < 5


def test_reasoning_is_removed_from_many_blanks_in_linear_time() -> None:
    blanks = " \n" * 30_000
    begin = time.monotonic()
    assert without_reasoning(f"<think>a</think> <think>b</think>c{blanks}d{blanks}<think>e</think>") == f"c{blanks}d"
    assert time.monotonic() - begin < 5
