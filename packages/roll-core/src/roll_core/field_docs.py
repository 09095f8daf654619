"""Shows in `help()` what fields mean. A field is documented by the string below it, which Python itself forgets."""

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
    """Let the docstrings of a module's dataclasses end with their fields. Called at the end of the module; the source
    is read when a docstring is."""
    for each in vars(sys.modules[module]).values():
        if isinstance(each, type) and each.__module__ == module and is_dataclass(each):
            each.__doc__ = _Docstring(each.__doc__ or "")  # type: ignore[assignment]


class _Docstring:
    """A class's docstring and its fields, those of its bases first."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, owner: type) -> str:
        lines = [line for base in reversed(owner.__mro__) if is_dataclass(base) for line in _fields(base)]
        text = inspect.cleandoc(self._text)
        return "\n".join([text, "", "Fields:", "", *lines]) if lines else text


def _fields(cls: type) -> Iterator[str]:
    """Name, type and default of each field that a class declares itself, its meaning indented below."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # no source here
        return
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    for statement, below in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or ast.unparse(statement.annotation).startswith("ClassVar"):
            continue
        yield ast.unparse(statement)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield textwrap.indent(inspect.cleandoc(str(below.value.value)), "    ")
