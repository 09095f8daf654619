"""The public API of plugins, as text: `public_api.txt`.

A change of that file is a change for plugins: additions keep HOOK_API, removals need a warning release first
(docs/plugins.md, "Versions"). `python tests/plugins/test_api_snapshot.py` rewrites it.
"""

import ast
from collections.abc import Iterator
from dataclasses import fields
from difflib import unified_diff
from inspect import signature
from pathlib import Path
from typing import get_args

import griffe
import pytest

import roll_core
import roll_tools
from roll_core.errors import ContractError
from roll_core.plugins.records import KINDS
from roll_core.runtime.workers.build import role_config
from roll_core.spec import HOOK_API, hooks, pipeline, platform, providers
from roll_core.spec.config import RunConfig
from roll_testing.errors import raises_error

SNAPSHOT = Path(__file__).with_name("public_api.txt")
REPOSITORY = Path(__file__).parents[2]
PUBLIC = {
    "roll_core": (
        "errors",
        "types",
        "spec",
        "algorithms",
        "data",
        "pipelines",
        "http_requests",
        "reward_pool",
    ),
    "roll_kernels": ("extensions",),
    "roll_modeling": (
        *("export", "logprobs", "lora", "memory", "model", "offload", "optimizer", "portable_files"),
        *("portable_state", "process_group", "state_files", "strategy", "task_model"),
    ),
    "roll_weight_transports": ("bucket_plan", "digests"),
}
"""Public modules by package, with their submodules: the list of docs/plugins.md."""


def public_api() -> str:
    """One line for each public name: signatures with annotations, bases, and fields of classes."""
    lines = []
    for package, modules in PUBLIC.items():
        source = REPOSITORY / "packages" / package.replace("_", "-") / "src"
        root = griffe.load(package, search_paths=[source])
        for name in modules:
            lines += _module(root[name])
    return "\n".join(lines) + "\n"


def _module(module: griffe.Module) -> Iterator[str]:
    own = [member for name, member in sorted(module.members.items()) if _is_public(name, member)]
    if names := [member for member in own if not member.is_module]:
        yield f"\n{module.path}"
        for member in names:
            yield from _member(member, "  ")
    for member in own:
        if member.is_module:
            yield from _module(member)


def _member(member: griffe.Object, indent: str) -> Iterator[str]:
    if member.is_class:
        marks = " ".join(f"@{str(decorator.value).partition('(')[0]}" for decorator in member.decorators)
        yield f"{indent}{marks}{' ' if marks else ''}class {member.name}({', '.join(map(str, member.bases))})"
        for name, own in member.members.items():
            if _is_public(name, own) or (name == "__init__" and "dataclass" not in member.labels):
                yield from _member(own, f"{indent}    ")
    elif member.is_function:
        marks = "".join(f"@{label} " for label in sorted(member.labels & {"abstractmethod", "async", "property"}))
        yield f"{indent}{marks}{member.name}({_parameters(member)}) -> {member.returns}"
    else:
        annotation = f": {member.annotation}" if member.annotation is not None else ""
        value = str(member.value) if member.value is not None else ""
        alias = f" = {value}" if value.startswith(("Literal[", "Callable[")) else " = …" if value else ""
        yield f"{indent}{member.name}{annotation}{alias}"


def _parameters(function: griffe.Function) -> str:
    shown, kind = [], griffe.ParameterKind
    for parameter in function.parameters:
        stars = {kind.var_positional: "*", kind.var_keyword: "**"}.get(parameter.kind, "")
        if parameter.kind is kind.keyword_only and not any(text.startswith("*") for text in shown):
            shown.append("*")
        annotation = f": {parameter.annotation}" if parameter.annotation is not None else ""
        default = f" = {parameter.default}" if parameter.default is not None and not stars else ""
        shown.append(f"{stars}{parameter.name}{annotation}{default}")
    return ", ".join(shown)


def _is_public(name: str, member: griffe.Object | griffe.Alias) -> bool:
    return not name.startswith("_") and not member.is_alias


def test_the_public_api_is_unchanged() -> None:
    difference = unified_diff(SNAPSHOT.read_text(encoding="utf-8").splitlines(), public_api().splitlines(), n=1)
    assert not list(difference)


def test_plugins_may_import_the_names_of_the_snapshot() -> None:
    from roll_testing.packaging import PUBLIC as IMPORTABLE

    modules = [f"{package}.{name}" for package, names in PUBLIC.items() for name in names]
    assert all(any(f"{module}.".startswith(f"{name}.") for name in IMPORTABLE) for module in modules)


def test_the_hook_api_is_the_first():
    assert HOOK_API == 1


@pytest.mark.parametrize("record", ["TrainCapabilities", "InferCapabilities"])
def test_every_capability_is_read_by_runtime_check_or_doctor(record):
    """One that nothing reads would promise what nobody honours. Kinds of model parallelism are read by their names:
    tests/config/test_strategy_schemas.py has each of them."""
    read = set(get_args(providers.ModelParallelism)) if record == "TrainCapabilities" else set()
    core, doctor = Path(roll_core.__file__).parent, tuple(Path(roll_tools.__file__).parent.glob("mismatch_*.py"))
    for pattern in ("config/**/*.py", "runtime/**/*.py", "pipelines/**/*.py", "spec/providers.py"):
        for path in (*core.glob(pattern), *doctor):
            read |= {name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for name in _asked(node)}
    assert not {field.name for field in fields(getattr(providers, record))} - read


def _asked(node):
    """Names of capabilities that an expression reads."""
    if isinstance(node, ast.Attribute):
        of = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        return [node.attr] if of in ("capabilities", "can") else []
    if isinstance(node, ast.For) and "getattr(self.capabilities, name)" in ast.unparse(node):
        return [each.value for each in ast.walk(node.iter) if isinstance(each, ast.Constant)]
    asks = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr"
    return [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)] if asks else []


def test_kinds_of_roles_and_tasks():
    assert platform.ROLE_KINDS == ("train", "score", "generate", "reward")
    assert providers.TASKS == ("causal_lm", "value", "reward", "flow")


@pytest.mark.parametrize(("field", "value"), [("kind", "infer"), ("task", "lm"), ("kind", None)])
def test_role_of_unknown_kind_or_task_is_refused_at_construction(field, value):
    with raises_error(ContractError, "RoleSpec", "'actor_infer'", field, value) as raised:
        pipeline.RoleSpec(**{"name": "actor_infer", "kind": "generate", field: value})
    known = platform.ROLE_KINDS if field == "kind" else providers.TASKS
    assert all(each in str(raised.value) for each in known)


def test_a_role_that_the_config_does_not_have_is_named():
    with raises_error(ContractError, "actor_infer"):
        role_config(RunConfig(pipeline="x"), "actor_infer")


def test_every_kind_of_record_has_a_hook():
    parameters = {name: signature(value).parameters for name, value in vars(hooks).items() if name[:5] == "roll_"}
    named = {name for name in parameters if not parameters[name]}
    assert [kind.hook for kind in KINDS if kind.hook not in named] == []
    records = {name for name in vars(providers) if name.endswith("Provider")} - {"Provider"}
    assert len(KINDS) == len(named) == len(records)
    assert {kind.record.__name__ for kind in KINDS} == records


if __name__ == "__main__":
    SNAPSHOT.write_text(public_api(), encoding="utf-8")
