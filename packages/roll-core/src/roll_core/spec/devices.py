"""Parser for `device_mapping`: a list of slots, or an expression over ranges. Expressions are parsed, never evaluated.

mapping := term ("+" term)*
term    := "list" "(" (range | slots) ")" | range | slots
slots   := "[" [int ("," int)* [","]] "]"
range   := "range" "(" int ["," int ["," int]] ")"
"""

from __future__ import annotations

import ast
import re
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_SLOTS = 1_000_000
_WORDS = re.compile(r"(?:[\s()\[\],+-]|\b(?:list|range|[0-9]{1,9})\b)*", re.ASCII)
"""Matches text that has only words and signs of the grammar."""


def parse_device_mapping(value: object) -> tuple[int, ...]:
    """Slots of a mapping, in order. Raises `ValueError` with the reason and the position in the expression."""
    if isinstance(value, str):
        slots = _slots(value)
    elif isinstance(value, (list, tuple)):
        for slot in value:
            if isinstance(slot, bool) or not isinstance(slot, int):
                raise ValueError(f"device_mapping has {slot!r}, expected slot numbers")
        slots = list(value)
    else:
        raise ValueError("device_mapping must be a list of slot numbers or an expression such as list(range(0,8))")
    if not slots:
        raise ValueError("device_mapping names no slot; remove it for a role on the host's CPU")
    negative = [slot for slot in slots if slot < 0]
    if negative:
        raise ValueError(f"device_mapping names slot {negative[0]}; slots are counted from 0")
    seen: set[int] = set()
    for slot in slots:
        if slot in seen:
            raise ValueError(f"device_mapping names slot {slot} twice")
        seen.add(slot)
    return tuple(slots)


def slots_by_node(slots: Sequence[int], per_node: int) -> list[tuple[int, ...]]:
    """The slots of a worker, in order, split where the node changes."""
    return [tuple(part) for _, part in groupby(slots, key=lambda slot: slot // per_node)]


def is_even(parts: Sequence[Sequence[int]], per_node: int) -> bool:
    """True if each of `slots_by_node` is another node, with as many slots."""
    return len({len(part) for part in parts}) == 1 and len({part[0] // per_node for part in parts}) == len(parts)


def _slots(text: str) -> list[int]:
    """Slots of an expression. Raises `ValueError`."""
    words = _WORDS.match(text)
    end = words.end() if words is not None else 0
    if end < len(text):
        raise _error(text, end, "is not part of a mapping")
    expression = re.sub(r"\s", " ", text)
    begin = len(text) - len(text.lstrip())
    try:
        return _evaluated(text, ast.parse(expression[begin:], mode="eval").body, begin)
    except SyntaxError as error:
        raise _error(text, begin + (error.offset or 1) - 1, f"is not valid: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{text[:80]!r}: nested too deeply") from None


def _evaluated(text: str, node: ast.expr, begin: int) -> list[int]:
    """Slots of a node, which starts `begin` characters after its own offset."""
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            slots = _evaluated(text, left, begin) + _evaluated(text, right, begin)
        case ast.Call(func=ast.Name("list"), args=[ast.List() | ast.Call(func=ast.Name("range")) as inner]):
            slots = _evaluated(text, inner, begin)
        case ast.Call(func=ast.Name("range"), args=[_] | [_, _] | [_, _, _] as bounds):
            numbers = [_number(text, bound, begin) for bound in bounds]
            if numbers[2:] == [0]:
                raise ValueError(f"{text[:80]!r}: a range's step is not 0")
            slots = list(range(*numbers)[: MAX_SLOTS + 1])
        case ast.List(elts=items):
            slots = [_number(text, item, begin) for item in items]
        case _:
            raise _error(text, begin + node.col_offset, "is not list(range(…)), range(…) or [slot, …]")
    if len(slots) > MAX_SLOTS:
        raise ValueError(f"{text[:80]!r}: more than the {MAX_SLOTS} slots allowed")
    return slots


def _number(text: str, node: ast.expr, begin: int) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return -number
    raise _error(text, begin + node.col_offset, "is not a number")


def _error(text: str, offset: int, problem: str) -> ValueError:
    rest = text[offset : offset + 12].split("\n")[0]
    subject = repr(rest) if rest else "the end"
    return ValueError(f"{text[:80]!r}: {subject} at character {offset + 1} {problem}")
