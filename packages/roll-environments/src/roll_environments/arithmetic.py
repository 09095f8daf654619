"""Evaluates arithmetic in Python's syntax, without running code: numbers, operators and a few functions."""

from __future__ import annotations

import ast
import math
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Number = int | float

MAX_TEXT = 500
"""Maximum characters of an expression."""
MAX_BITS = 4096
"""Maximum bits of every intermediate integer. Bounds time and memory."""
MAX_ARGUMENT = 400
"""Largest argument of `factorial` and `comb`, and largest number of digits of `round`."""


class ExpressionError(ValueError):
    """The text is no arithmetic expression, or its value is undefined or too large."""


def evaluate(text: str) -> Number:
    """Value of an expression. Raises `ExpressionError`."""
    if len(text) > MAX_TEXT:
        raise ExpressionError(f"the expression has {len(text)} characters, more than {MAX_TEXT}")
    try:
        value: Number | list[Number] = _value(ast.parse(text.strip(), mode="eval").body)
    except ExpressionError:
        raise
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise ExpressionError(str(error) or type(error).__name__) from None
    if isinstance(value, list):
        raise ExpressionError("the value is a list, expected a number")
    return value


def _power(base: Number, exponent: Number) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise ExpressionError("the result is too large")
    return base**exponent


def _small(function: Callable[..., int]) -> Callable[..., int]:
    def call(*arguments: int) -> int:
        if any(abs(argument) > MAX_ARGUMENT for argument in arguments):
            raise ExpressionError(f"an argument is larger than {MAX_ARGUMENT}")
        return function(*arguments)

    return call


def _round(value: Number, *digits: int) -> Number:
    """`round`. Python computes `10 ** -digits` for an integer, which takes minutes for -10,000,000 digits."""
    if any(abs(number) > MAX_ARGUMENT for number in digits):
        raise ExpressionError(f"round to more than {MAX_ARGUMENT} digits")
    return round(value, *digits)


OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(math, name) for name in ("sqrt", "floor", "ceil", "gcd", "lcm", "log", "exp", "sin", "cos", "tan")
    },
    "abs": abs,
    "comb": _small(math.comb),
    "factorial": _small(math.factorial),
    "max": max,
    "min": min,
    "round": _round,
    "sum": sum,
}
CONSTANTS = {"pi": math.pi, "e": math.e}


def _value(node: ast.AST) -> Any:
    """Value of a node: a number, or a list as an argument of a function."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_number(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _bounded(OPERATORS[type(op)](_number(left), _number(right)))
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_number(element) for element in elements]
        case ast.Call(func=func, args=arguments, keywords=[]):
            name = func.attr if isinstance(func, ast.Attribute) and ast.unparse(func.value) == "math" else ""
            name = func.id if isinstance(func, ast.Name) else name
            if name in FUNCTIONS:
                return _bounded(FUNCTIONS[name](*map(_value, arguments)))
    raise ExpressionError(f"{ast.unparse(node):.50} is not arithmetic")


def _number(node: ast.AST) -> Number:
    value: Number | list[Number] = _value(node)
    if isinstance(value, list):
        raise ExpressionError("a list is not a number")
    return value


def _bounded(value: Any) -> Number:
    if not isinstance(value, int | float):
        raise ExpressionError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ExpressionError("the result is too large")
    return value
