"""Checks a part's signature against its contract, and its imports, whenever a config is read.

    record.target ─► file of the module ─► syntax tree ─► signature ─► accepts the parameters?
                                                      └─► imports of its package ─► do these names exist?

The sources are parsed without an import. Modules without source, names that are assigned or imported, inherited
methods and decorated functions are therefore checked only by `plugins --check` (`roll_testing.part_checks`). Parts of
roll-core itself come with their contracts, and mypy checks them.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import inspect
import sys
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.errors import closest, one_line
from roll_core.plugins.records import kind_of
from roll_core.spec.providers import FragmentProvider

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.machinery import ModuleSpec

    from roll_core.spec.providers import Provider

OURS = ("roll_core", "roll_kernels", "roll_modeling", "roll_weight_transports")
CHANGES = "docs/plugin-changes.md"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def signature_problem(record: Provider) -> str:
    """Why the target of a record cannot be called as its contract requires; empty if it can or is not checked."""
    if record.target.startswith("roll_core."):
        return ""
    _forget_files()
    contract = kind_of(type(record)).contract
    return _problem(contract, _source(contract), record.target, _source(record.target))


def import_problem(record: Provider) -> str:
    """Why the target of a record cannot be imported, as far as sources tell; empty if nothing is wrong.

    Missing are a module, an attribute, or a name that a module of the same package imports from ROLL, for instance
    because another release had it. `plugins --check` imports the part and finds the rest.
    """
    if record.target.startswith("roll_core.") or isinstance(record, FragmentProvider):
        return ""
    _forget_files()
    module, _, attribute = record.target.partition(":")
    return _missing(module, attribute.partition(".")[0]) or _missing_imports(module, set())


def _forget_files() -> None:
    """Forget what earlier checks read: in a notebook, a file may have been mended since."""
    for cached in (_missing, _imports, _spec, _module_source):
        cached.cache_clear()


def _missing_imports(module: str, seen: set[str]) -> str:
    """First import of a module, or of one of its package that it imports, that cannot work; empty if there is none."""
    seen.add(module)
    package = module.partition(".")[0]
    for name, names in _imports(module):
        root = name.partition(".")[0]
        if root not in (package, *OURS):
            continue
        if problem := next(filter(None, (_missing(name, imported) for imported in names or ("",))), ""):
            release = f"; {CHANGES} lists what was renamed" if root in OURS else ""
            return f"{module} cannot be imported: {problem}{release}"
        if root == package:
            modules = [
                name,
                *(f"{name}.{submodule}" for submodule in names if _spec(f"{name}.{submodule}") is not None),
            ]
            for below in modules:
                if below not in seen and (problem := _missing_imports(below, seen)):
                    return problem
    return ""


@lru_cache(maxsize=1024)
def _missing(module: str, name: str) -> str:
    """What is missing of a module and its attribute; empty if both exist, or if that is unknown without an import."""
    if _spec(module) is None:  # a module that a notebook or a test made has no file, but is imported already
        return "" if module in sys.modules else f"there is no module {module}"
    source = _module_source(module)
    if source is None or not name:
        return ""
    try:
        known = _names(source)
    except (ValueError, SyntaxError) as error:
        return f"{module} cannot be parsed: {one_line(error)}"
    if known is None or name in known or _spec(f"{module}.{name}") is not None:
        return ""
    close = closest(name, known)
    return f"{module} has no {name!r}{f'; did you mean {close}?' if close else ''}"


@lru_cache(maxsize=128)
def _problem(contract_target: str, contract_source: bytes, target: str, source: bytes) -> str:
    """`signature_problem` of two names and the sources of their modules. Parsing takes most of a config's load time."""
    contract, definition = _definition(contract_target, contract_source), _definition(target, source)
    if not isinstance(contract, ast.ClassDef) or definition is None:
        return ""
    expected = _methods(contract)
    if isinstance(definition, ast.ClassDef):
        for name, method in _methods(definition).items():
            if name in expected and (why := _why_not(method, expected[name].args.args, expected[name])):
                return f"{target}.{name} cannot be called as {contract.name}.{name} is: {why}"
    elif "__call__" in expected and not definition.decorator_list:
        called = expected["__call__"]
        if why := _why_not(definition, called.args.args[1:], called):
            return f"{target} cannot be called as {contract.name} is: {why}"
    return ""


# -- sources -----------------------------------------------------------------------------------------------------------


def _methods(definition: ast.ClassDef) -> dict[str, Function]:
    """Public methods, `__init__` and `__call__`; only `abstractmethod` and `override` are allowed as decorators."""
    return {
        method.name: method
        for method in definition.body
        if isinstance(method, Function)
        and (method.name in ("__init__", "__call__") or not method.name.startswith("_"))
        and all(ast.unparse(mark) in ("abstractmethod", "override") for mark in method.decorator_list)
    }


def _why_not(function: Function, positional: list[ast.arg], expected: Function) -> str:
    """Why `found` does not accept `positional` plus the keyword-only parameters of `expected`; empty if it does."""
    by_name = {parameter.arg: None for parameter in expected.args.kwonlyargs}
    try:
        _signature(function.args).bind(*positional, **by_name)
    except (TypeError, ValueError) as error:  # ValueError: two parameters of one name
        arguments = [parameter.arg for parameter in positional] + [f"{name}=" for name in by_name]
        return f"given {', '.join(arguments)}: {error}"
    return ""


def _signature(args: ast.arguments) -> inspect.Signature:
    """Signature with the name and kind of each parameter; a default is only marked as present."""
    kinds, none = inspect.Parameter, inspect.Parameter.empty
    positional = [*args.posonlyargs, *args.args]
    required = len(positional) - len(args.defaults)
    parameters = [
        inspect.Parameter(
            arg.arg,
            kinds.POSITIONAL_ONLY if i < len(args.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=none if i < required else None,
        )
        for i, arg in enumerate(positional)
    ]
    if args.vararg is not None:
        parameters.append(inspect.Parameter(args.vararg.arg, kinds.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters.append(inspect.Parameter(arg.arg, kinds.KEYWORD_ONLY, default=none if default is None else None))
    if args.kwarg is not None:
        parameters.append(inspect.Parameter(args.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _definition(target: str, source: bytes) -> Function | ast.ClassDef | None:
    """Function or class that `"module:name"` defines at module level of `source`; None if there is none."""
    try:
        tree = _parsed(source)
    except (ValueError, SyntaxError):
        return None
    name = target.partition(":")[2]
    named = [node for node in tree.body if isinstance(node, Function | ast.ClassDef) and node.name == name]
    return named[-1] if named else None


def _parsed(source: bytes) -> ast.Module:
    """Parse a source with garbage collection disabled.

    A finalizer that parses too, for instance by formatting a traceback, breaks Python 3.11's parser (`AST constructor
    recursion depth mismatch`, python/cpython#106905).
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collecting:
            gc.enable()


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, without those of a `try`, which handles what is missing."""
    for statement in body:
        if isinstance(statement, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(statement.test):
                yield from _statements(statement.body)
            yield from _statements(statement.orelse)
        elif isinstance(statement, ast.With):
            yield from _statements(statement.body)
        else:
            yield statement


@lru_cache(maxsize=256)
def _imports(module: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Absolute names of the modules that a module imports when it is imported, with the names taken from them."""
    try:
        body = _parsed(_module_source(module) or b"").body
    except (ValueError, SyntaxError):
        return ()
    spec = _spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    imports: list[tuple[str, tuple[str, ...]]] = []
    for statement in _statements(body):
        if isinstance(statement, ast.Import):
            imports += [(alias.name, ()) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            above = module.split(".")[: -statement.level + is_package or None] if statement.level else []
            names = tuple(alias.name for alias in statement.names if alias.name != "*")
            imports.append((".".join([*above, *filter(None, [statement.module])]), names))
    return tuple(imports)


@lru_cache(maxsize=256)
def _names(source: bytes) -> frozenset[str] | None:
    """Names that a module binds; None if it computes some of them."""
    bound: set[str] = set()
    nodes: list[ast.AST] = list(_parsed(source).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, Function | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            bound |= {node.id} if isinstance(node.ctx, ast.Store) else set()
        else:
            nodes += ast.iter_child_nodes(node)
    return None if bound & {"*", "__getattr__"} or b"globals()" in source else frozenset(bound)


@lru_cache(maxsize=1024)
def _spec(module: str) -> ModuleSpec | None:
    """Where a module is, without importing its parent packages; None if there is none."""
    path, *below = module.split(".")
    try:
        spec = importlib.util.find_spec(path)
        for name in below:
            if spec is None or spec.submodule_search_locations is None:
                return None
            path = f"{path}.{name}"
            spec = PathFinder.find_spec(path, spec.submodule_search_locations)
    except (ImportError, KeyError, ValueError):  # KeyError: below a package without __init__.py
        return None
    return spec


@lru_cache(maxsize=256)
def _module_source(module: str) -> bytes | None:
    """Source of a module; None if it has none."""
    spec = _spec(module)
    origin = spec.origin if spec is not None and spec.has_location else None
    try:
        return Path(origin).read_bytes() if origin is not None and origin.endswith(".py") else None
    except OSError:
        return None


def _source(target: str) -> bytes:
    """Source of the module of `"module:name"`; empty if unavailable."""
    return _module_source(target.partition(":")[0]) or b""
