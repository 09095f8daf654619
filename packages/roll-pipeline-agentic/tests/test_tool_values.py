"""Values of tool calls that are written without quotes, read by the schemas of the tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roll_pipeline_agentic.tool_calls import parse_tool_calls
from roll_pipeline_agentic.tool_values import ToolSchemas

STATE = {"enum": ["open", "007"], "title": "State", "type": "string"}


def tool(schema: Any, **parameters: Any) -> list[dict[str, Any]]:
    properties = {"type": "object", "properties": {"a": schema}, **parameters}
    return [{"type": "function", "function": {"name": "f", "parameters": properties}}]


def same(value: Any, other: Any) -> bool:
    return json.dumps(value) == json.dumps(other)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, " true ", True),
        ({"type": ["boolean", "null"]}, "None", None),
        ({"type": "string"}, "12345", "12345"),
        ({"type": "string"}, "None", "None"),
        ({"type": "string"}, '"quoted" ', '"quoted" '),
        ({"type": ["string", "null"]}, "10001", "10001"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "True", "True"),
        ({"type": "string", "nullable": True}, "007", "007"),
        ({"type": "string", "nullable": True}, "None", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "7"}, "7", "7"),
        ({"$ref": "#/$defs/State"}, "007", "007"),
        ({"allOf": [{"$ref": "#/$defs/State"}], "default": "open"}, "007", "007"),
        ({"oneOf": [{"$ref": "#/$defs/State"}, {"type": "integer"}]}, "7", 7),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "number"}, "1e-07", 1e-7),
        ({"type": "number"}, "2", 2),
        ({"type": ["integer", "string"]}, "12a", "12a"),
        ({"type": ["integer", "string"]}, "12", 12),
        ({"type": "array"}, '["a", true]', ["a", True]),
        ({"type": "array"}, "['a', True, None]", ["a", True, None]),
        ({"type": "object"}, "{'a': {'b': 1.5}}", {"a": {"b": 1.5}}),
        ({"type": "object"}, r"{'a': '\d'}", {"a": r"\d"}),
        ({"type": ["array", "string"]}, "['a']", "['a']"),
        ({}, "12", 12),
        ({}, "True", True),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, "two words", "two words"),
        (True, "12", 12),
        ({"$ref": "#/$defs/Loop"}, "12", 12),
        ({"$ref": "other.json"}, "12", 12),
        ({"type": "text"}, "12", 12),
    ],
)
def test_a_value_has_the_type_of_its_schema(schema: Any, text: str, value: Any) -> None:
    tools = tool(schema, **{"$defs": {"State": STATE, "Loop": {"$ref": "#/$defs/Loop"}}})
    assert same(ToolSchemas(tools).value("f", "a", text), value)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "boolean"}, "maybe"),
        ({"type": "boolean"}, "1"),
        ({"type": "integer"}, "1.5"),
        ({"type": "integer"}, "True"),
        ({"type": "integer"}, ""),
        ({"type": "number"}, "NaN"),
        ({"type": ["number", "null"]}, "many"),
        ({"type": "array"}, "a, b"),
        ({"type": "array"}, "[1, {2}]"),
        ({"type": "array"}, "[" * 9000),
        ({"type": "object"}, "[1]"),
        ({"type": "object"}, "{'a': open('x')}"),
        ({"type": "integer"}, "9" * 5000),
    ],
)
def test_a_value_of_another_type_is_malformed(schema: Any, text: str) -> None:
    with pytest.raises(ValueError, match="'a'"):
        ToolSchemas(tool(schema)).value("f", "a", text)
    body = f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>"
    parsed = parse_tool_calls(f"<tool_call>\n{body}\n</tool_call>", "qwen3_coder", tools=tool(schema))
    assert parsed.tool_calls == []
    assert parsed.error


def test_parameters_are_found_where_schemas_put_them() -> None:
    text = {"type": "string"}
    for parameters in (
        {"properties": {}, "additionalProperties": text},
        {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": text}}]},
        {"$ref": "#/$defs/All", "$defs": {"All": {"properties": {"a": text}}}},
    ):
        tools = [{"name": "f", "parameters": parameters}]
        assert ToolSchemas(tools).value("f", "a", "12") == "12"
    assert ToolSchemas([{"name": "f", "parameters": None}]).value("f", "a", "12") == 12
    assert ToolSchemas(()).value("f", "a", "12") == 12


@pytest.mark.parametrize("format", ["qwen3_coder", "glm45"])
def test_formats_without_quotes_read_values_by_the_schema(format: str) -> None:
    tools = tool({"type": "boolean"})
    text = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\nFalse\n</parameter>\n</function>\n</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>False</arg_value>\n</tool_call>",
    }[format]
    (call,) = parse_tool_calls(text, format, tools=tools).tool_calls
    assert call["function"]["arguments"] == '{"a": false}'
