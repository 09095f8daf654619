"""docs/configuration.md lists every key of every schema, with its type, default and meaning, as the code has them.

ROLL_UPDATE_GOLDEN=1 updates the lists. The YAML examples are loaded as well.
"""

import ast
import inspect
import os
import re
import textwrap
from pathlib import Path

import pytest

from roll_core.config import load
from roll_core.config.schema import members
from roll_core.plugins.registry import Registry
from roll_core.plugins.targets import load_target
from roll_core.spec.config import Config
from roll_testing.kit import hf_plugins
from shared_tests.config_table import key_entry

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"
TEXT = DOCS.read_text(encoding="utf-8")
PIPELINES = ("roll-pipeline-agentic", "roll-pipeline-diffusion", "roll-pipeline-distill", "roll-pipeline-preference")
BEGIN, END = "<!-- keys: made by tests/config/test_configuration_docs.py -->\n", "<!-- end of keys -->"


def schemas():
    """Every schema of roll-core, the hf packages and `PIPELINES`, with bases and inner mappings, in order of visits."""
    found = []

    def visit(schema):
        if schema in found or not issubclass(schema, Config):
            return
        for base in reversed(schema.__mro__[1:]):
            if isinstance(base, type) and issubclass(base, Config) and base is not Config:
                visit(base)
        found.append(schema)
        for field in schema.model_fields.values():
            for member, _ in members(field.annotation):
                visit(member)

    for record in (each for plugin in hf_plugins(*PIPELINES) for each in plugin.providers):
        if record.config:
            visit(load_target(record.config, owner=record.name))
    return found


def own_fields(schema):
    """`(name, type, default, meaning)` of the fields that a class declares itself, read from its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0].body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or statement.target.id not in schema.model_fields:
            continue
        documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        meaning = " ".join(following.value.value.split()) if documented else ""
        yield statement.target.id, spell_type(statement.annotation), spell_default(statement.value), meaning


def spell_type(node):
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated":
        kind, field = node.slice.elts[0], node.slice.elts[1]
        bounds = {word.arg: ast.unparse(word.value) for word in getattr(field, "keywords", [])}
        signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
        return " ".join([spell_type(kind), *(f"{signs[name]} {bounds[name]}" for name in signs if name in bounds)])
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return " | ".join(str(each.value) for each in values)
    return ast.unparse(node)


def spell_default(node):
    if node is None:
        return ""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Field":
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        made = {"dict": "{}", "list": "[]"}.get(given.get("default_factory", ""), "")
        return given.get("default", made).replace("'", "")
    if isinstance(node, ast.Call):
        return ", ".join(f"{each.arg}: {ast.unparse(each.value)}" for each in node.keywords) or "its defaults"
    value = ast.unparse(node)
    return {"None": "null", "True": "true", "False": "false"}.get(value, value.replace("'", ""))


def lists():
    lines = []
    for schema in schemas():
        rows = list(own_fields(schema))
        title = inspect.getdoc(schema).split("\n\n")[0]
        bases = [base.__name__.strip("_") for base in schema.__bases__ if base is not Config]
        if not rows:
            continue
        lines += [f"### {schema.__name__.strip('_')}", "", textwrap.fill(" ".join(title.split()), 100), ""]
        if bases:
            lines += [f"Has the keys of {' and '.join(bases)}, and:", ""]
        lines += ["".join(key_entry(*row) for row in rows)]
    return "\n".join(lines)


def test_the_keys_are_those_of_the_schemas():
    found = lists()
    head, _, rest = TEXT.partition(BEGIN)
    if os.environ.get("ROLL_UPDATE_GOLDEN"):
        DOCS.write_text(head + BEGIN + found + END + rest.partition(END)[2], encoding="utf-8")
    else:
        assert rest.partition(END)[0] == found, "run with ROLL_UPDATE_GOLDEN=1 and read the difference"


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.__name__)
def test_every_key_says_what_it_means(schema):
    silent = [name for name, _, _, meaning in own_fields(schema) if not meaning]
    # A role in a pipeline and a part's own name are explained by their type.
    assert [name for name in silent if name not in ("reward", "pipeline", "data_args", *ROLES)] == []


ROLES = ("model_args", "training_args", "generating_args", "strategy_args", "rewards", "kind")


def test_every_key_of_every_schema_is_listed():
    for schema in schemas():
        for name in schema.model_fields:
            assert f"\n- `{name}` (" in TEXT, f"{schema.__name__}.{name}"


def test_the_example_loads(tmp_path):
    example = re.search(r"```yaml\n(pipeline: .*?)```", TEXT, flags=re.DOTALL)[1]
    file = tmp_path / "sums.yaml"
    file.write_text(example)
    config = load(file, ["max_steps=20"], Registry(hf_plugins())).config
    assert len(config.actor_train.device_mapping) == 8
    assert config.max_steps == 20
