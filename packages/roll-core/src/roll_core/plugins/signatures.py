"""Whether a part can be called as its contract says, read from the sources of both: neither is imported.

    record.target ─► file of the module ─► syntax tree ─► signature ─► takes the parameters of the contract's?

What cannot be read is not judged: modules without source, names that are assigned or imported, decorated functions.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import inspect
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.spec import providers

if TYPE_CHECKING:
    from roll_core.spec.providers import Provider

Function = ast.FunctionDef | ast.AsyncFunctionDef
CONTRACTS: dict[type[Provider], str] = {
    providers.PlatformProvider: "roll_core.spec.platform:Platform",
    providers.TrainProvider: "roll_core.spec.train:TrainStrategy",
    providers.InferProvider: "roll_core.spec.infer:InferStrategy",
    providers.PipelineProvider: "roll_core.spec.pipeline:Pipeline",
    providers.RewardProvider: "roll_core.spec.reward:RewardFunction",
    providers.TrackerProvider: "roll_core.spec.tracker:Tracker",
    providers.WeightTransportProvider: "roll_core.spec.transport:WeightTransport",
    providers.AdvantageProvider: "roll_core.spec.algorithms:AdvantageEstimator",
    providers.PolicyLossProvider: "roll_core.spec.algorithms:PolicyLoss",
    providers.ImporterProvider: "roll_core.spec.importing:Importer",
}


def signature_problem(record: Provider) -> str:
    """Why the part that a record points at cannot be called by its contract; empty if it can or cannot be judged."""
    contract = _definition(CONTRACTS.get(type(record), ""))
    found = _definition(record.target)
    if not isinstance(contract, ast.ClassDef) or found is None:
        return ""
    expected = _methods(contract)
    if isinstance(found, ast.ClassDef):
        for name, method in _methods(found).items():
            if name in expected and (why := _why_not(method, expected[name].args.args, expected[name])):
                return f"{record.target}.{name} cannot be called as {contract.name}.{name} is: {why}"
    elif "__call__" in expected and not found.decorator_list:
        called = expected["__call__"]
        if why := _why_not(found, called.args.args[1:], called):
            return f"{record.target} cannot be called as {contract.name} is: {why}"
    return ""


def _methods(definition: ast.ClassDef) -> dict[str, Function]:
    """Public ones, the constructor and `__call__`, without properties and whatever else is decorated."""
    return {
        each.name: each
        for each in definition.body
        if isinstance(each, Function)
        and (each.name in ("__init__", "__call__") or not each.name.startswith("_"))
        and all(ast.unparse(mark) in ("abstractmethod", "override") for mark in each.decorator_list)
    }


def _why_not(found: Function, positional: list[ast.arg], expected: Function) -> str:
    """Why a function does not take `positional` by position and what the expected one has after `*` by name."""
    by_name = {each.arg: None for each in expected.args.kwonlyargs}
    try:
        _signature(found.args).bind(*positional, **by_name)
    except TypeError as error:
        given = [each.arg for each in positional] + [f"{name}=" for name in by_name]
        return f"given {', '.join(given)}: {error}"
    return ""


def _signature(args: ast.arguments) -> inspect.Signature:
    """Names, kinds, and whether there is a default."""
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


def _definition(target: str) -> Function | ast.ClassDef | None:
    """The function or class that `"module:name"` defines at the top of its module."""
    module, _, name = target.partition(":")
    try:
        source = _source(module)
        tree = _parsed(source.read_bytes()) if source is not None else None
    except (ImportError, KeyError, ValueError, OSError, SyntaxError):  # KeyError: below a package without __init__.py
        return None
    defined = [each for each in tree.body if isinstance(each, Function | ast.ClassDef)] if tree is not None else []
    named = [each for each in defined if each.name == name]
    return named[-1] if named else None


def _parsed(source: bytes) -> ast.Module:
    """The syntax tree. Nothing is collected meanwhile: a finalizer that parses as well, as one that formats a traceback
    does, breaks Python 3.11's parser (`AST constructor recursion depth mismatch`, python/cpython#106905)."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collecting:
            gc.enable()


def _source(module: str) -> Path | None:
    """The file of a module. No package on the way to it is imported."""
    top, *below = module.split(".")
    spec, path = importlib.util.find_spec(top), top
    for name in below:
        if spec is None or spec.submodule_search_locations is None:
            return None
        path = f"{path}.{name}"
        spec = PathFinder.find_spec(path, spec.submodule_search_locations)
    origin = spec.origin if spec is not None and spec.has_location else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None
