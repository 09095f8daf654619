"""Writes the keys of a config schema as a table for the docs, and checks that a page has this table."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from typing import TYPE_CHECKING, Any

from roll_core.spec.config import Config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

HEADER = ("key", "type", "default", "meaning")
NUMBERS = {"PositiveInt": "int > 0", "NonNegativeInt": "int >= 0"}
UPDATE_VARIABLE = "ROLL_UPDATE_GOLDEN"


def check_table(page: Path, schema: type[Config], begin: str, end: str, names: Mapping[str, str] | None = None) -> None:
    """Fail unless the text of `page` between `begin` and `end` is the table of `schema`.

    With `ROLL_UPDATE_GOLDEN=1` in the environment, write the table instead. `names` maps type names to the text shown
    for them.
    """
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    written, _, after = rest.partition(end)
    lines = (HEADER, ("---",) * len(HEADER), *_rows(schema, "", NUMBERS | dict(names or {})))
    table = "".join(f"| {' | '.join(each)} |\n" for each in lines)
    if os.environ.get(UPDATE_VARIABLE):
        page.write_text(before + begin + table + end + after, encoding="utf-8")
    elif written != table:
        raise AssertionError(f"{page.name} lacks the table of {schema.__name__}; {UPDATE_VARIABLE}=1 writes it")


def _rows(schema: type[Config], prefix: str, names: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table, read from the source, where the docstring below a field is its meaning."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, field = statement.target.id, schema.model_fields[statement.target.id]
        if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
            yield from _rows(field.annotation, f"{prefix}{name}.", names)
            continue
        kind = ast.unparse(statement.annotation)
        for short, long in names.items():
            kind = kind.replace(short, long)
        meaning = _text(following)
        assert meaning, f"{schema.__name__}.{name} has no docstring"
        default = _spelled(field.get_default(call_default_factory=True))
        yield (
            f"`{prefix}{name}`",
            kind.replace("|", "or").replace(" or None", ""),
            f"`{default}`",
            " ".join(meaning.split()),
        )


def _text(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return str(statement.value.value)
    return ""


def _spelled(value: Any) -> str:
    if isinstance(value, list):
        return "[]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
