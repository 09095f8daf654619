"""Integer arithmetic as in C, for expressions of shell scripts."""

from __future__ import annotations

import ast
import operator
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_LENGTH = 1000
"""Characters of an expression."""


def evaluate(expression: str, number: Callable[[str], int]) -> int:
    """Value of an expression; an empty one is 0. `number` returns the value of a variable.

    Raises `ValueError` for an expression that is none, or a result of more than 64 bits, and the errors of `number`.
    """
    text = re.sub(r"&&", " and ", re.sub(r"\|\|", " or ", re.sub(r"!(?!=)", " not ", expression))).strip()
    if len(text) > MAX_LENGTH:
        raise ValueError("the expression is too long")
    try:
        return _value(ast.parse(text or "0", mode="eval").body, number)
    except (SyntaxError, KeyError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _value(node: ast.expr, number: Callable[[str], int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        result = node.value
    elif isinstance(node, ast.Name):
        result = number(node.id)
    elif isinstance(node, ast.BinOp):
        result = _OPERATORS[type(node.op)](_value(node.left, number), _value(node.right, number))
    elif isinstance(node, ast.UnaryOp):
        result = _SIGNS[type(node.op)](_value(node.operand, number))
    elif isinstance(node, ast.BoolOp):
        values = (_value(operand, number) for operand in node.values)
        result = int(any(values) if isinstance(node.op, ast.Or) else all(values))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        result = int(_ORDERS[type(node.ops[0])](_value(node.left, number), _value(node.comparators[0], number)))
    else:
        raise ValueError(f"{type(node).__name__} is not supported")
    if abs(result) >= 2**63:
        raise ValueError("the result has more than 64 bits")
    return result


def _quotient(left: int, right: int) -> int:
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) is (right < 0) else -quotient


def _power(base: int, exponent: int) -> int:
    if not 0 <= exponent <= 64 or abs(base) >= 2**63:
        raise ValueError
    return int(base**exponent)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
    ast.Pow: _power,
}
_SIGNS: dict[type[ast.unaryop], Callable[[int], int]] = {
    ast.Not: lambda number: int(not number),
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_ORDERS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
