"""Checks installed parts against their contracts, as `roll-core plugins --check` reports them.

record.target ─► imported class or function, with what it inherits ─► signatures, plain or coroutine
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from roll_core.errors import PluginError, PluginLoadError, closest
from roll_core.plugins.records import kind_of
from roll_core.plugins.requirements import check_requirements, is_absent
from roll_core.plugins.targets import data_file, known_errors, load_class, load_target
from roll_core.spec import config, providers
from roll_core.spec.providers import (
    CheckProvider,
    FragmentProvider,
    InferProvider,
    KnownErrorsProvider,
    PipelineProvider,
    TrainProvider,
    WeightTransportProvider,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from roll_core.plugins.registry import Registry
    from roll_core.spec.config import RunConfig
    from roll_core.spec.diagnostics import CheckContext, CheckResult
    from roll_core.spec.plan import MemoryEstimate, MemoryInput, PipelinePlan
    from roll_core.spec.providers import Provider


def check_parts(registry: Registry) -> tuple[list[str], list[str]]:
    """Describe everything that would fail on use: what is broken, and parts whose packages are not installed.

    Broken are plugins that did not load, parts that cannot be imported or break their contract, packages of another
    version, and misspelt names of weight transports.
    """
    broken = [str(plugin.error) for plugin in registry.plugins if plugin.error is not None]
    absent: list[str] = []
    transports = registry.names(WeightTransportProvider)
    for plugin in registry.plugins:
        for record in plugin.providers:
            try:
                check_requirements(record, owner=registry.owner(record))
                check_part(record, owner=registry.owner(record))
            except PluginError as error:
                (absent if is_absent(record) else broken).append(str(error))
            for name in getattr(getattr(record, "capabilities", None), "weight_transports", ()):
                close = closest(name, transports)
                if close and name not in transports:
                    broken.append(f"{registry.owner(record)}: lists weight transport {name!r}; did you mean {close!r}?")
    return broken, absent


def check_part(record: Provider, *, owner: str) -> None:
    """Import everything that a record refers to, and check it against the contract of its kind.

    Raises `PluginLoadError` if an import fails, the class is no subclass of the contract's class or lacks an abstract
    method, or one of its methods, inherited ones included, cannot be called or awaited as the contract's. Functions
    that the record names are compared with their contracts too.
    """
    if isinstance(record, FragmentProvider):
        data_file(record.target, owner=owner)
        return
    if isinstance(record, KnownErrorsProvider):
        known_errors(record, owner=owner)
        return
    contract = _contract(record)
    part = load_target(record.target, owner=owner)
    if contract is None:
        if not callable(part):
            raise PluginLoadError(f"{owner}: {record.target} is not callable")
        call = _calls(record).get("target")
        problem = function_problem(record.target, part, call) if call is not None else ""
    else:
        part = load_class(record.target, contract, owner=owner)
        missing = sorted(part.__abstractmethods__)
        if missing:
            raise PluginLoadError(f"{owner}: {record.target} does not implement {', '.join(missing)}")
        problem = class_problem(part, contract)
    if problem:
        raise PluginLoadError(f"{owner}: {problem}")
    if record.config:
        load_class(record.config, _schema(record), owner=owner)
    for field, call in _calls(record).items():
        target = getattr(record, field)
        if field != "target" and target:
            problem = function_problem(target, load_target(target, owner=owner), call)
            if problem:
                raise PluginLoadError(f"{owner}: {problem}")
    if starter := getattr(record, "starter", ""):
        data_file(starter, owner=owner)


def class_problem(cls: type, contract: type) -> str:
    """Why an object of `cls` cannot be used as its base `contract`, by the first wrong method; empty if it can.

    Compares every public method and `__init__` that `cls` or another of its bases overrides.
    """
    for name in dir(contract):
        expected, actual = inspect.getattr_static(contract, name), inspect.getattr_static(cls, name)
        public = name == "__init__" or not name.startswith("_")
        if not public or not inspect.isfunction(expected) or actual is expected:
            continue
        bound = isinstance(actual, (staticmethod, classmethod))
        method = getattr(cls, name) if bound else actual
        parameters = list(inspect.signature(expected).parameters.values())
        if problem := _callable_problem(method, parameters[1:] if bound else parameters, expected):
            return f"{cls.__module__}:{cls.__qualname__}.{name} {problem}"
    return ""


def function_problem(name: str, function: Any, contract: Any) -> str:
    """Why `function` cannot be called as `contract` is: a function, or a protocol with `__call__`; empty if it can."""
    call = contract.__call__ if inspect.isclass(contract) else contract
    parameters = list(inspect.signature(call).parameters.values())
    problem = _callable_problem(function, parameters[1:] if inspect.isclass(contract) else parameters, call)
    return f"{name} {problem}" if problem else ""


def _callable_problem(function: Any, parameters: list[inspect.Parameter], contract: Callable[..., Any]) -> str:
    """Why `found` cannot be called with `parameters` and awaited as `wanted` is."""
    expected = inspect.signature(contract)
    if not callable(function):
        return f"is {type(function).__name__}, expected a function with the signature {expected}"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return ""
    positional = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    by_name = {parameter.name: None for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    try:
        signature.bind(*positional, **by_name)
    except TypeError as error:
        return f"has the signature {signature}, expected {expected}: {error}"
    awaited = inspect.iscoroutinefunction(contract)
    either = "Awaitable" in str(expected.return_annotation)
    coroutine = inspect.iscoroutinefunction(inspect.unwrap(function))
    if awaited and not coroutine and "Awaitable" not in str(signature.return_annotation):
        return f"is a plain function, expected a coroutine function with the signature {expected}"
    if coroutine and not awaited and not either:
        return f"is a coroutine function, expected a plain function with the signature {expected}"
    return ""


def _contract(record: Provider) -> type | None:
    """Base class that the target must have; None if the contract is a function's."""
    contract = kind_of(type(record)).contract
    loaded: Any = load_target(contract, owner="roll-core") if contract else None
    return None if getattr(loaded, "_is_protocol", False) else loaded


def _calls(record: Provider) -> dict[str, Any]:
    """Contracts of the functions that a record names, by field: `target`, `memory` or `plan`."""
    contract = kind_of(type(record)).contract
    if isinstance(record, CheckProvider):
        return {"target": _check}
    if isinstance(record, PipelineProvider):
        return {"plan": _plan}
    if isinstance(record, (TrainProvider, InferProvider)):
        return {"memory": _memory}
    return {"target": load_target(contract, owner="roll-core")} if contract else {}


def _check(context: CheckContext) -> Iterable[CheckResult]:
    raise NotImplementedError


def _memory(question: MemoryInput) -> MemoryEstimate:
    raise NotImplementedError


def _plan(config: RunConfig) -> PipelinePlan:
    raise NotImplementedError


def _schema(record: Provider) -> type:
    schemas: dict[type[Provider], type] = {
        providers.TrainProvider: config.StrategyConfig,
        providers.InferProvider: config.StrategyConfig,
        providers.PipelineProvider: config.RunConfig,
        providers.RewardProvider: config.RewardConfig,
    }
    return schemas.get(type(record), config.Config)
