"""docs/fsdp2.md lists every key with its type, default and meaning, as the schema has them.

ROLL_UPDATE_GOLDEN=1 writes the table anew.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import textwrap
from pathlib import Path

from roll_strategy_fsdp2.config import FSDP2Config, WrapPolicy

PAGE = Path(__file__).parents[3] / "docs" / "fsdp2.md"
BEGIN, END = "<!-- table: made by packages/roll-strategy-fsdp2/tests/test_docs.py -->\n", "<!-- end of table -->"


def rows(schema, prefix=""):
    """Read from the source, where the meaning stands below the field."""
    body = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0].body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign):
            continue
        name = statement.target.id
        if name == "wrap_policy":
            yield from rows(WrapPolicy, "wrap_policy.")
            continue
        kind = ast.unparse(statement.annotation).replace("PositiveInt", "int > 0").replace("DType", "fp32 | bf16")
        default = schema.model_fields[name].get_default(call_default_factory=True)
        assert isinstance(following, ast.Expr), f"{name} has no docstring"
        meaning = " ".join(following.value.value.split())
        yield [f"`{prefix}{name}`", kind.replace("|", "or").replace(" or None", ""), f"`{spelled(default)}`", meaning]


def spelled(value):
    if value is None or isinstance(value, (bool, list)):
        return json.dumps(value)
    return value


def table():
    lines = [["key", "type", "default", "meaning"], ["---"] * 4, *rows(FSDP2Config)]
    return "".join(f"| {' | '.join(each)} |\n" for each in lines)


def test_the_page_has_every_key_as_the_schema_has_it():
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    written, _, after = rest.partition(END)
    if os.environ.get("ROLL_UPDATE_GOLDEN"):
        PAGE.write_text(before + BEGIN + table() + END + after, encoding="utf-8")
        return
    assert written == table()
