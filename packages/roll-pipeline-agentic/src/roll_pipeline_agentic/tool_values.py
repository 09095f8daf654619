"""Reads values that a model writes without quotes, by the schemas of the tools.

zip: 10001        {"type": ["string", "null"]}     the text "10001"
express: False    {"type": "boolean"}              false: some chat templates write Python's constants
express: maybe    {"type": "boolean"}              ValueError
"""

from __future__ import annotations

import ast
import json
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ALL_TYPES = frozenset({"null", "boolean", "integer", "number", "array", "object", "string"})
"""Types of a value without a schema."""
CONSTANTS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}
"""Constants of JSON and of Python: Jinja's filter `string` writes the latter."""
MAX_DEPTH = 16
"""Maximum number of references and combined schemas around a type. Deeper ones do not restrict it."""


class ToolSchemas:
    """The parameters of tools by name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._parameters = {str(function.get("name")): function.get("parameters") or {} for function in functions}

    def __contains__(self, tool: str) -> bool:
        return tool in self._parameters

    def value(self, tool: str, key: str, text: str) -> Any:
        """The value of a parameter. Raises `ValueError` if the text is no value of its type.

        A text is literal if the schema allows no other type that the text could be. Without a schema, it is the JSON
        value, the constant, or else the text.
        """
        types = self._types(tool, key)
        if types == {"string"}:
            return text
        word = text.strip()
        if word in CONSTANTS and _type(CONSTANTS[word]) in types:
            return CONSTANTS[word]
        value = _parsed(word, python="string" not in types)
        kind = _type(value)
        if kind == "number" and "number" not in types and value.is_integer():
            kind, value = "integer", int(value)
        if kind in types and (kind != "string" or types == ALL_TYPES):
            return value
        if "string" in types:
            return text
        raise ValueError(f"the value of {key!r} in the call of {tool!r} is {text!r:.80}, expected {_names(types)}")

    def _types(self, tool: str, key: str) -> frozenset[str]:
        root = self._parameters.get(tool, {})
        return _types({"anyOf": list(_schemas_of(key, root, root, 0)) or [True]}, root, 0)


def parse_json(text: str) -> Any:
    """A JSON value. Raises `ValueError`, also for constants that are not JSON, and `RecursionError`."""
    return json.loads(text, parse_constant=no_constant)


def no_constant(name: str) -> Any:
    """Raise `ValueError` for a constant that Python's parser accepts beside JSON."""
    raise ValueError(f"{name} is not JSON")


def _parsed(word: str, *, python: bool) -> Any:
    """The JSON value, or with `python` the list or dict in Python's syntax; the text itself for all others."""
    try:
        return parse_json(word)
    except (ValueError, RecursionError):
        pass
    if python and word.startswith(("[", "{")):
        try:
            with warnings.catch_warnings(action="ignore"):  # of invalid escapes in texts
                value = ast.literal_eval(word)
            json.dumps(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return word
        return value
    return word


def _schemas_of(key: str, schema: Any, root: Any, depth: int) -> Iterator[Any]:
    """Schemas of a parameter in those of all parameters."""
    schema = _resolved(schema, root)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    if isinstance(properties, dict) and key in properties:
        yield properties[key]
    elif isinstance(others, dict):
        yield others
    for name in ("allOf", "anyOf", "oneOf"):
        for part in _list(schema.get(name)):
            yield from _schemas_of(key, part, root, depth + 1)


def _types(schema: Any, root: Any, depth: int) -> frozenset[str]:
    """Types that a schema allows; all if it does not restrict them, or contradicts itself."""
    schema = _resolved(schema, root)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return ALL_TYPES
    allowed = []
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else _list(schema["type"])
        known = ALL_TYPES.issuperset(name for name in names if isinstance(name, str))
        allowed.append(frozenset(names) | ({"integer"} if "number" in names else set()) if known else ALL_TYPES)
    if values := [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
        allowed.append(frozenset(map(_type, values)))
    for name in ("anyOf", "oneOf"):
        if parts := _list(schema.get(name)):
            allowed.append(frozenset().union(*(_types(part, root, depth + 1) for part in parts)))
    allowed += [_types(part, root, depth + 1) for part in _list(schema.get("allOf"))]
    types = ALL_TYPES.intersection(*allowed)
    return (types | {"null"} if schema.get("nullable") is True else types) or ALL_TYPES


def _resolved(schema: Any, root: Any) -> Any:
    """The schema that a chain of `$ref` to parts of `root` ends with; `True`, which allows all, if there is none."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        beginning, *names = schema["$ref"].split("/")
        target = root if beginning == "#" else True
        for name in names:
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else True
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**target, **beside} if isinstance(target, dict) else beside
    return True


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return next((name for cls, name in names.items() if isinstance(value, cls)), "string")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _names(types: frozenset[str]) -> str:
    return " or ".join(sorted(types - {"integer"} if "number" in types else types))
