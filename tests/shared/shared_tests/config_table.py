"""Writes the keys of a config schema as a list for the docs, and checks that a page has this list."""

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

NUMBERS = {"PositiveInt": "int > 0", "NonNegativeInt": "int >= 0"}
UPDATE_VARIABLE = "ROLL_UPDATE_GOLDEN"


def check_table(page: Path, schema: type[Config], begin: str, end: str, names: Mapping[str, str] | None = None) -> None:
    """Fail unless the text of `page` between `begin` and `end` is the list of the keys of `schema`.

    With `ROLL_UPDATE_GOLDEN=1` in the environment, write the list instead. `names` maps type names to the text shown
    for them.
    """
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    written, _, after = rest.partition(end)
    table = "".join(key_entry(*each) for each in _rows(schema, "", NUMBERS | dict(names or {})))
    if os.environ.get(UPDATE_VARIABLE):
        page.write_text(before + begin + table + end + after, encoding="utf-8")
    elif written != table:
        raise AssertionError(f"{page.name} differs from {schema.__name__}; {UPDATE_VARIABLE}=1 updates it")


def key_entry(key: str, kind: str, default: str, meaning: str, example: str = "") -> str:
    """A list item of a page, wrapped at 100 columns: the key with its type, default and example, then its meaning."""
    named = {"default": default, "example": example}
    facts = ", ".join([kind, *(f"{name} `{value}`" for name, value in named.items() if value)])
    text = f"- `{key}` ({facts})" + (f": {meaning}" if meaning else "")
    return textwrap.fill(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def _rows(schema: type[Config], prefix: str, names: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield key, type, default and meaning, read from the source: the docstring below a field is its meaning."""
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
        yield f"{prefix}{name}", kind.replace("|", "or").replace(" or None", ""), default, " ".join(meaning.split())


def _text(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return str(statement.value.value)
    return ""


def _spelled(value: Any) -> str:
    if isinstance(value, list):
        return "[]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
