"""Converts pydantic's errors to messages: the value found and the value expected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from roll_core.errors import closest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.config.source import KeyPath
    from roll_core.errors import PluginError


NOT_SHOWN = "a secret (not shown)"


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake, with the path of the key it concerns."""

    path: KeyPath
    message: str
    hint: str = ""
    at_key: bool = False
    """True if the message points at the key rather than the value."""
    kind: str = ""
    """pydantic's error type."""
    shown: str = ""
    """The value as shown in `message`."""
    code: str = ""
    """Error code (see `roll_core.errors`); derived from `kind` if empty."""


CODES = {
    "extra_forbidden": "ROLL-C010",
    "missing": "ROLL-C011",
    "invalid_key": "ROLL-C012",
    "value_error": "ROLL-C014",
}
"""Error codes by pydantic's error type. Any other type concerns a single value."""


def code_of(finding: Finding) -> str:
    """The stable code of a mistake."""
    return finding.code or CODES.get(finding.kind, "ROLL-C013")


def plugin_finding(path: KeyPath, error: PluginError) -> Finding:
    """The mistake that a lookup of plugins found at `path`: all lines but the first are its hint."""
    message, _, hint = str(error).partition("\n    ")
    return Finding(path, message, hint, code=error.code)


def findings(errors: Sequence[Any], data: Any) -> list[Finding]:
    """Mistakes, one per path: errors of a union's alternatives are merged into one."""
    by_path: dict[KeyPath, list[Any]] = {}
    for error in errors:
        by_path.setdefault(_path(error, data), []).append(error)
    merged = [_finding(path, group) for path, group in by_path.items()]
    # If an alternative of a union matches except for one of its items, that item has its own finding.
    above = {finding.path[:depth] for finding in merged for depth in range(len(finding.path))}
    return [finding for finding in merged if not (finding.shown and finding.path in above)]


def show(value: Any, key: str = "") -> str:
    """Value as shown in a message: shortened, and hidden if its key marks it as a secret."""
    from roll_core.config.secrets import is_secret  # compiles many patterns, which a valid config does not need

    if is_secret(key, value):
        return NOT_SHOWN
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return f"a mapping with {len(value)} keys" if len(value) != 1 else "a mapping with 1 key"
    if isinstance(value, (list, tuple)):
        return f"a list of {_items(len(value))}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _items(count: int) -> str:
    return f"{count} items" if count != 1 else "1 item"


def _path(error: Any, data: Any) -> KeyPath:
    """Path of an error in the config. pydantic's location also names the alternatives of unions, which are not keys."""
    steps: list[str] = []
    here = data
    location = error["loc"]
    for i, step in enumerate(location):
        in_list = isinstance(here, (list, tuple)) and isinstance(step, int) and 0 <= step < len(here)
        if in_list or (isinstance(here, dict) and step in here):
            # pydantic names the key `true` as 1, because they are equal.
            steps.append(str(step if in_list else next(key for key in here if key == step)))
            here = here[step]
        elif error["type"] == "missing" and i == len(location) - 1:
            steps.append(str(step))
    return tuple(steps)


def _finding(path: KeyPath, errors: list[Any]) -> Finding:
    error = errors[0]
    kind, value = error["type"], error["input"]
    name = path[-1] if path else ""
    if kind == "extra_forbidden":
        return Finding(path, "there is no such key", at_key=True, kind=kind)
    if kind == "missing":
        return Finding(path, "is missing", at_key=True, kind=kind)
    if kind == "string_pattern_mismatch" and error["loc"][-1:] == ("[key]",):
        message = f"found the key {name!r}, expected {_expected(error)}"
        return Finding(path, message, at_key=True, kind=kind, code="ROLL-C012")
    if kind == "invalid_key" or error["loc"][-1:] == ("[key]",):
        name = name.lower() if name in ("True", "False") else name
        return Finding(path, f"a key is text, found {name}", f"put quotes around it: '{name}'", True, "invalid_key")
    ours = [error for error in errors if error["type"] in ("value_error", "assertion_error")]
    if ours:
        cause = ours[0].get("ctx", {}).get("error")
        message = str(cause if cause is not None else ours[0]["msg"])
        return Finding(path, message, at_key=isinstance(value, dict | BaseModel), kind="value_error")
    expected = " or ".join(dict.fromkeys(_expected(error) for error in errors))
    shown = show(value, name)
    hint = "" if shown == NOT_SHOWN else _hint(value, errors)
    return Finding(path, f"found {shown}, expected {expected}", hint, kind=kind, shown=shown)


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
    "none_required": "nothing",
}
PATTERNS = {
    r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$": "module:function, such as my_rewards:score",
    r"^[A-Za-z][\w+.-]*://": "a URL, such as s3://bucket/prefix or file:///mnt/store",
    r"^https?://[^\s]+$": "a URL, http://… or https://…",
    r"^[\w.-]+$": "a name of letters, digits and . _ -",
    r"^[A-Za-z_][\w.()-]*$": "the name of an environment variable",
    r"^[^\x00]*$": "text without the character NUL",
    r"^[^-\s]\S*$": "the name of a metric, such as val/score/mean",
}
"""What the patterns of schemas mean."""
_BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", "≥"),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "≤"),
}
_LENGTHS = {"too_short": ("min_length", "at least"), "too_long": ("max_length", "at most")}


def _expected(error: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in _BOUNDS:
        name, sign = _BOUNDS[kind]
        bound = context[name]
        return f"a number {sign} {bound if isinstance(bound, int) else format(bound, 'g')}"
    if kind in _LENGTHS:
        name, sign = _LENGTHS[kind]
        return f"{sign} {_items(context[name])}"
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "")
    if kind == "string_pattern_mismatch":
        return PATTERNS.get(context["pattern"], f"text that matches {context['pattern']}")
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    message = str(error["msg"])
    return message.removeprefix("Input should be ").removeprefix("a valid ")


def _hint(value: Any, errors: list[Any]) -> str:
    kinds = {error["type"] for error in errors}
    if isinstance(value, str) and "literal_error" in kinds:
        import re

        expected = next(str(error["ctx"]["expected"]) for error in errors if error["type"] == "literal_error")
        close = closest(value, re.findall(r"'([^']*)'", expected), 0.5)
        return f"did you mean {close}?" if close else ""
    if isinstance(value, str):
        is_bool = "bool_type" in kinds and value.lower() in ("true", "false", "yes", "no", "on", "off")
        return (
            "write it without quotes" if is_bool or (kinds & {"int_type", "float_type"} and _is_number(value)) else ""
        )
    if "string_type" in kinds and isinstance(value, (int, float)):
        return f"put quotes around it: '{str(value).lower() if isinstance(value, bool) else value}'"
    if value is None:
        return "remove the key to use its default"
    is_whole = "int_type" in kinds and isinstance(value, float) and value.is_integer()
    return f"write {int(value)}" if is_whole else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
