"""Writes the keys of a config schema as a list for the docs, and checks that a page has this list."""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from typing import TYPE_CHECKING, Any

from roll_core.spec.config import Config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

NUMBERS = {"PositiveInt": "int > 0", "NonNegativeInt": "int >= 0"}
UPDATE_VARIABLE = "ROLL_UPDATE_GOLDEN"
FORMLESS = ("null", "[]", "")
"""Defaults that do not show the form of a value."""


def check_table(
    page: Path, schema: type[Config], begin: str, end: str, names: Mapping[str, str], examples: Mapping[str, str]
) -> None:
    """Fail unless the text of `page` between `begin` and `end` is the list of the keys of `schema`.

    With `ROLL_UPDATE_GOLDEN=1` in the environment, write the list instead. `names` maps type names to the text shown
    for them. `examples` has the value of each key whose type and default show no form, and of no other.
    """
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    written, _, after = rest.partition(end)
    rows = list(_rows(schema, "", NUMBERS | dict(names)))
    bare = [key for key, kind, default, _ in rows if default in FORMLESS and kind != "bool" and "Literal[" not in kind]
    assert sorted(examples) == sorted(bare), f"{page.name}: examples of other keys than those without a form"
    table = "".join(
        key_entry(key, re.sub(r"Literal\[(.*?)\]", _options, kind), default, meaning, examples.get(key, ""))
        for key, kind, default, meaning in rows
    )
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
    """Yield key, type, default and meaning, read from the source: the docstring below a field is its meaning.

    Keys of bases come last, those of classes without source (arguments that an engine validates) not at all.
    """
    for owner in schema.__mro__:
        if not issubclass(owner, Config) or owner is Config:
            continue
        try:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        except OSError:
            continue
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            name = statement.target.id
            if name not in schema.model_fields:
                continue
            field = schema.model_fields[name]
            if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
                yield from _rows(field.annotation, f"{prefix}{name}.", names)
                continue
            kind = ast.unparse(statement.annotation)
            for short, long in names.items():
                kind = kind.replace(short, long)
            meaning = _text(following)
            assert meaning, f"{owner.__name__}.{name} has no docstring"
            default = _spelled(field.get_default(call_default_factory=True))
            yield f"{prefix}{name}", kind.replace("|", "or").replace(" or None", ""), default, " ".join(meaning.split())


def _options(literal: re.Match[str]) -> str:
    return " or ".join(str(each) for each in ast.literal_eval(f"[{literal[1]}]"))


def _text(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return str(statement.value.value)
    return ""


def _spelled(value: Any) -> str:
    if isinstance(value, list):
        return "[]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
