"""docs/configuration.md lists every key of every schema, with its type, default and meaning, as the code has them.

ROLL_UPDATE_GOLDEN=1 updates the lists. The YAML examples are loaded as well.
"""

import ast
import inspect
import os
import re
import textwrap
import typing
from functools import cache
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from roll_core.config import load
from roll_core.config.schema import members
from roll_core.config.source import Loader
from roll_core.plugins.registry import Registry
from roll_core.plugins.targets import load_target
from roll_core.spec.config import Config, Needs, RunConfig, WorkerConfig
from shared_tests.config_table import key_entry
from shared_tests.hf_plugins import hf_plugins

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"
TEXT = DOCS.read_text(encoding="utf-8")
PIPELINES = ("roll-pipeline-agentic", "roll-pipeline-diffusion", "roll-pipeline-distill", "roll-pipeline-preference")
BEGIN, END = "<!-- keys: made by tests/config/test_configuration_docs.py -->\n", "<!-- end of keys -->"


REPOSITORY = Path(__file__).parents[2]


def read_yaml(text):
    """Values as the config loader reads them: `1e-6` is a number. Interpolations stay text."""
    return yaml.load(text, Loader)


MORE = read_yaml((Path(__file__).parent / "key_examples.yaml").read_text(encoding="utf-8"))
OPTIONS = {
    "strategy_config": "strategy_name",
    "adv_options": "adv_estimator",
    "pg_options": "pg_variant",
    "env_config": "environment",
}
"""Keys with options of a part, and the sibling key that names the part."""
CRITIC = {"critic": {"strategy_args": {"strategy_name": "hf_train"}}}
COMPANIONS = {"critic_lambd": CRITIC, "critic_epochs": CRITIC, "window_options": {"window": "random"}}
"""Keys without which a key is rejected."""
MAX_EXAMPLE = 64
"""Maximum number of characters of an example."""


@cache
def providers():
    return [each for plugin in hf_plugins(*PIPELINES) for each in plugin.providers if each.config]


@cache
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

    for record in providers():
        visit(load_target(record.config, owner=record.name))
    return found


def named(name, base=Config):
    """Schema of the part with this name; None if there is none below `base`."""
    found = [load_target(each.config, owner=each.name) for each in providers() if each.name == name]
    return next((each for each in found if issubclass(each, base)), None)


@cache
def examples():
    """The shortest value by `(class, key)` in the checked YAML files and the blocks of the docs."""
    found = {}

    def visit(schema, values):
        for name, value in values.items():
            if name not in schema.model_fields:
                continue
            text = spell_example(value)
            owner = next(each for each in schema.__mro__ if name in vars(each).get("__annotations__", {}))
            field = schema.model_fields[name]
            shows_nothing = isinstance(value, bool) or value in (field.default, None, {}, []) or "${" in text
            if not shows_nothing and len(text) <= MAX_EXAMPLE:
                found[owner, name] = min(found.get((owner, name), text), text, key=len)
            inner = [named(values.get(OPTIONS[name]))] if name in OPTIONS else []
            for member, is_mapping in [*members(field.annotation), *((each, False) for each in inner if each)]:
                for each in value.values() if is_mapping and isinstance(value, dict) else [value]:
                    if isinstance(each, dict):
                        visit(named(each.get("reward"), member) or member, each)

    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    blocks = [
        block for page in pages for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text("utf-8"), re.S | re.M)
    ]
    files = [each for folder in ("examples", "recipes") for each in sorted((REPOSITORY / folder).glob("*/*.yaml"))]
    texts = [each.read_text(encoding="utf-8") for each in files] + [
        part
        for block in blocks  # a block of alternatives has one in each line
        for part in (block.splitlines() if block.count("device_mapping:") == block.count("\n") else [block])
    ]
    for text in texts:
        values = {str(key): value for key, value in read_yaml(text).items()}
        tops = [each for each in (named(values.get("pipeline")), *schemas()) if each]
        fitting = [each for each in tops if issubclass(each, (RunConfig, WorkerConfig)) and fits(each, values)]
        for top in fitting[:1]:
            visit(top, values)
    return found


def example(schema, name):
    """Text of a key's example; empty if its type lists the values, or its default shows the form."""
    if is_obvious(schema.model_fields[name].annotation):
        return ""
    return examples().get((schema, name)) or spell_example(MORE.get(schema.__name__, {}).get(name, ""))


def fits(schema, values):
    return all(key in schema.model_fields or key == "defaults" for key in values)


def spell_example(value):
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).removesuffix("...\n").strip()
    return "" if text == "''" else text


def is_obvious(annotation):
    """True for booleans and names, which the type lists."""
    options = set(typing.get_args(annotation)) - {type(None)} or {annotation}
    return all(each is bool or typing.get_origin(each) is typing.Literal or isinstance(each, str) for each in options)


def own_fields(schema):
    """`(name, type, default, meaning)` of the fields that a class declares itself, read from its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0].body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or statement.target.id not in schema.model_fields:
            continue
        documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        meaning = " ".join(following.value.value.split()) if documented else ""
        metadata = schema.model_fields[statement.target.id].metadata
        for needs in (each for each in metadata if isinstance(each, Needs) and each.condition in schema.model_fields):
            values = " or ".join(f"`{value}`" for value in sorted(needs.values))
            meaning += f" Read only with `{needs.condition}`{values and f' {values}'}."
        default = spell_default(statement.value)
        if isinstance(statement.value, ast.Name):
            text = str(schema.model_fields[statement.target.id].default)
            default = text if len(text) <= MAX_EXAMPLE else "its text"
        yield statement.target.id, spell_type(statement.annotation), default, meaning


def spell_type(node):
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated":
        kind, field = node.slice.elts[0], node.slice.elts[1]
        bounds = {word.arg: ast.unparse(word.value) for word in getattr(field, "keywords", [])}
        signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
        return " ".join([spell_type(kind), *(f"{signs[name]} {bounds[name]}" for name in signs if name in bounds)])
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return " | ".join(str(each.value) for each in values)
    if isinstance(node, ast.BinOp):
        return f"{spell_type(node.left)} | {spell_type(node.right)}"
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
        if not rows and not bases:
            continue
        lines += [f"### {schema.__name__.strip('_')}", "", textwrap.fill(" ".join(title.split()), 100), ""]
        if bases:
            lines += [
                textwrap.fill(f"Has the keys of {', '.join(reversed(bases))}{', and:' if rows else '.'}", 100),
                "",
            ]
        lines += [] if not rows else ["".join(key_entry(*row, example(schema, row[0])) for row in rows)]
    return "\n".join(lines)


def test_the_keys_are_those_of_the_schemas():
    found = lists()
    head, _, rest = TEXT.partition(BEGIN)
    if os.environ.get("ROLL_UPDATE_GOLDEN"):
        DOCS.write_text(head + BEGIN + found + END + rest.partition(END)[2], encoding="utf-8")
    else:
        assert rest.partition(END)[0] == found, "run with ROLL_UPDATE_GOLDEN=1 and read the difference"


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.__name__)
def test_every_key_has_a_description(schema):
    silent = [name for name, _, _, meaning in own_fields(schema) if not meaning]
    # A role in a pipeline and a part's own name are explained by their type.
    assert [name for name in silent if name not in ("reward", "pipeline", "data_args", *ROLES)] == []


ROLES = ("model_args", "training_args", "generating_args", "strategy_args", "rewards", "kind")


def test_keys_have_an_example_unless_type_or_default_shows_one():
    """A default of null, `[]`, `{}`, or with the defaults of its own keys shows no form."""
    bare = [
        f"{schema.__name__}.{name}"
        for schema in schemas()
        for name, _, default, _ in own_fields(schema)
        if default in ("", "null", "[]", "{}", "its defaults")
        and not is_obvious(schema.model_fields[name].annotation)
        and not example(schema, name)
    ]
    assert bare == [], "add them to key_examples.yaml"


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.__name__)
def test_examples_are_valid(schema):
    for name, *_ in own_fields(schema):
        if text := example(schema, name):
            try:
                given = f"{name}: {text}".replace("s3://", "memory://")  # of a package that is not installed
                schema.model_validate(read_yaml(given) | COMPANIONS.get(name, {}))
            except ValidationError as error:
                # A rule between keys runs only for a valid key; it refuses the example without the other keys.
                marks = schema.model_fields[name].metadata
                rule = "value_error" if any(isinstance(mark, Needs) and mark.strict for mark in marks) else ""
                wrong = [found for found in error.errors() if found["loc"][:1] == (name,) and found["type"] != rule]
                assert wrong == [], f"{name}: {text}"


def test_further_examples_are_of_keys_that_nothing_else_sets():
    named_keys = {(name, key) for name, keys in MORE.items() for key in keys}
    listed = {(schema.__name__, name) for schema in schemas() for name, *_ in own_fields(schema)}
    assert named_keys <= listed
    assert not named_keys & {(schema.__name__, name) for schema, name in examples()}


def test_the_example_loads(tmp_path):
    example = re.search(r"```yaml\n(pipeline: .*?)```", TEXT, flags=re.DOTALL)[1]
    file = tmp_path / "sums.yaml"
    file.write_text(example)
    config = load(file, ["max_steps=20"], Registry(hf_plugins())).config
    assert len(config.actor_train.device_mapping) == 8
    assert config.max_steps == 20
