"""Checks a part's signature against its contract whenever a config is read.

    record.target ─► file of the module ─► syntax tree ─► signature ─► accepts the parameters?

The sources are parsed without an import. Modules without source, names that are assigned or imported, inherited
methods and decorated functions are therefore checked only by `plugins --check` (`roll_testing.part_checks`). Parts of
roll-core itself come with their contracts, and mypy checks them.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import inspect
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.plugins.records import kind_of

if TYPE_CHECKING:
    from roll_core.spec.providers import Provider

Function = ast.FunctionDef | ast.AsyncFunctionDef


def signature_problem(record: Provider) -> str:
    """Why the target of a record cannot be called as its contract requires; empty if it can or is not checked."""
    if record.target.startswith("roll_core."):
        return ""
    wanted = kind_of(type(record)).contract
    return _problem(wanted, _source(wanted), record.target, _source(record.target))


@lru_cache(maxsize=128)
def _problem(wanted: str, contract_source: bytes, target: str, source: bytes) -> str:
    """`signature_problem` of two names and the sources of their modules. Parsing takes most of a config's load time."""
    contract, found = _definition(wanted, contract_source), _definition(target, source)
    if not isinstance(contract, ast.ClassDef) or found is None:
        return ""
    expected = _methods(contract)
    if isinstance(found, ast.ClassDef):
        for name, method in _methods(found).items():
            if name in expected and (why := _why_not(method, expected[name].args.args, expected[name])):
                return f"{target}.{name} cannot be called as {contract.name}.{name} is: {why}"
    elif "__call__" in expected and not found.decorator_list:
        called = expected["__call__"]
        if why := _why_not(found, called.args.args[1:], called):
            return f"{target} cannot be called as {contract.name} is: {why}"
    return ""


# -- sources -----------------------------------------------------------------------------------------------------------


def _methods(definition: ast.ClassDef) -> dict[str, Function]:
    """Public methods, `__init__` and `__call__`; only `abstractmethod` and `override` are allowed as decorators."""
    return {
        each.name: each
        for each in definition.body
        if isinstance(each, Function)
        and (each.name in ("__init__", "__call__") or not each.name.startswith("_"))
        and all(ast.unparse(mark) in ("abstractmethod", "override") for mark in each.decorator_list)
    }


def _why_not(found: Function, positional: list[ast.arg], expected: Function) -> str:
    """Why `found` does not accept `positional` plus the keyword-only parameters of `expected`; empty if it does."""
    by_name = {each.arg: None for each in expected.args.kwonlyargs}
    try:
        _signature(found.args).bind(*positional, **by_name)
    except (TypeError, ValueError) as error:  # ValueError: two parameters of one name
        given = [each.arg for each in positional] + [f"{name}=" for name in by_name]
        return f"given {', '.join(given)}: {error}"
    return ""


def _signature(args: ast.arguments) -> inspect.Signature:
    """Signature with the name and kind of each parameter; a default is only marked as present."""
    kinds, none = inspect.Parameter, inspect.Parameter.empty
    positional = [*args.posonlyargs, *args.args]
    required = len(positional) - len(args.defaults)
    found = [
        inspect.Parameter(
            each.arg,
            kinds.POSITIONAL_ONLY if at < len(args.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=none if at < required else None,
        )
        for at, each in enumerate(positional)
    ]
    if args.vararg is not None:
        found.append(inspect.Parameter(args.vararg.arg, kinds.VAR_POSITIONAL))
    for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(inspect.Parameter(each.arg, kinds.KEYWORD_ONLY, default=none if default is None else None))
    if args.kwarg is not None:
        found.append(inspect.Parameter(args.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)


def _definition(target: str, source: bytes) -> Function | ast.ClassDef | None:
    """Function or class that `"module:name"` defines at module level of `source`; None if there is none."""
    try:
        tree = _parsed(source)
    except (ValueError, SyntaxError):
        return None
    name = target.partition(":")[2]
    named = [each for each in tree.body if isinstance(each, Function | ast.ClassDef) and each.name == name]
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


def _source(target: str) -> bytes:
    """Source of the module of `"module:name"`, found without importing its parent packages; empty if unavailable."""
    path, *below = target.partition(":")[0].split(".")
    try:
        spec = importlib.util.find_spec(path)
        for name in below:
            if spec is None or spec.submodule_search_locations is None:
                return b""
            path = f"{path}.{name}"
            spec = PathFinder.find_spec(path, spec.submodule_search_locations)
        origin = spec.origin if spec is not None and spec.has_location else None
        return Path(origin).read_bytes() if origin is not None and origin.endswith(".py") else b""
    except (ImportError, KeyError, ValueError, OSError):  # KeyError: below a package without __init__.py
        return b""
