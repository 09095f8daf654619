"""Shows field documentation in `help()`. A field is documented by the string below it, which Python itself discards."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from dataclasses import is_dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def document_fields(module: str) -> None:
    """Append documentation of the fields to the docstrings of a module's dataclasses. Call it at the end of the module.
    The source is read only when a docstring is accessed."""
    for member in vars(sys.modules[module]).values():
        if isinstance(member, type) and member.__module__ == module and is_dataclass(member):
            member.__doc__ = _Docstring(member.__doc__ or "")  # type: ignore[assignment]


class _Docstring:
    """Descriptor for `__doc__`: the class's docstring and its fields, fields of base classes first."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, owner: type) -> str:
        lines = [line for base in reversed(owner.__mro__) if is_dataclass(base) for line in _fields(base)]
        text = inspect.cleandoc(self._text)
        return "\n".join([text, "", "Fields:", "", *lines]) if lines else text


def _fields(cls: type) -> Iterator[str]:
    """Lines for each field that the class itself declares: name, type and default, then the indented description."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # no source available
        return
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    for statement, below in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or ast.unparse(statement.annotation).startswith("ClassVar"):
            continue
        yield ast.unparse(statement)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield textwrap.indent(inspect.cleandoc(str(below.value.value)), "    ")
