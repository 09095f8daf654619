"""Imports what a record points at, in the process that uses it."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from roll_core.errors import PluginLoadError
from roll_core.plugins.signatures import signature_problem
from roll_core.spec.known_errors import KnownError
from roll_core.spec.providers import FragmentProvider, KnownErrorsProvider

if TYPE_CHECKING:
    from pydantic import BaseModel

    from roll_core.spec.providers import Provider

T = TypeVar("T")
M = TypeVar("M", bound="BaseModel")


def load_target(target: str, *, owner: str) -> Any:
    """The object that `"module:attribute"` names.

    `owner` says in errors whose it is: `"infer strategy 'acme' of roll-infer-acme 1.2"`. Raises `PluginLoadError` with
    the cause chained, whatever the module raises when it is imported, SystemExit included.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise PluginLoadError(f"{owner}: target {target!r} is not 'module:attribute'")
    try:
        found: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code: SystemExit must not end the run without a word
        reason = " ".join(str(error).split())
        raise PluginLoadError(
            f"{owner}: importing {module_name} failed: {type(error).__name__}{': ' if reason else ''}{reason}"
        ) from error
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise PluginLoadError(f"{owner}: {module_name} has no {attribute!r}") from error
    return found


def load_class(target: str, base: type[T], *, owner: str) -> type[T]:
    """The class that `target` names. Raises `PluginLoadError` also if it is not a subclass of `base`."""
    found = load_target(target, owner=owner)
    if not isinstance(found, type) or not issubclass(found, base):
        raise PluginLoadError(f"{owner}: {target} is not a subclass of {base.__module__}.{base.__qualname__}")
    return found


def data_file(target: str, *, owner: str) -> Path:
    """The file that `"package:name.yaml"` names, in the folder of a package that is found and not imported.

    Raises `PluginLoadError` where there is none.
    """
    package, _, name = target.partition(":")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError) as error:
        raise PluginLoadError(f"{owner}: there is no package {package}: {error}") from error
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (file := Path(folder) / name).is_file():
            return file.resolve()
    raise PluginLoadError(f"{owner}: there is no file {name} in the package {package}")


def schema_of(record: Provider, base: type[M], *, owner: str) -> type[M]:
    """The schema that a record brings, `base` where it brings none. Raises `PluginLoadError`."""
    return load_class(record.config, base, owner=owner) if record.config else base


def check_part(record: Provider, *, owner: str) -> None:
    """Import everything that a record points at, and hold it against the contract of its kind.

    Raises `PluginLoadError` for what cannot be imported, is no subclass of the contract's class, lacks an abstract
    method, cannot be called as the contract says, or declares other capabilities than the record does.
    """
    if isinstance(record, FragmentProvider):
        data_file(record.target, owner=owner)
        return
    if isinstance(record, KnownErrorsProvider):
        known_errors(record, owner=owner)
        return
    if problem := signature_problem(record):
        raise PluginLoadError(f"{owner}: {problem}")
    contract = _contract(record)
    part = load_target(record.target, owner=owner)
    if contract is None:
        if not callable(part):
            raise PluginLoadError(f"{owner}: {record.target} is not callable")
    else:
        part = load_class(record.target, contract, owner=owner)
        missing = sorted(part.__abstractmethods__)
        if missing:
            raise PluginLoadError(f"{owner}: {record.target} does not implement {', '.join(missing)}")
    declared = getattr(record, "capabilities", None)
    actual = getattr(part, "capabilities", declared)
    if actual != declared:
        raise PluginLoadError(f"{owner}: {record.target} has other capabilities than its record: {actual}, {declared}")
    if record.config:
        load_class(record.config, _schema(record), owner=owner)
    for field in ("memory", "plan"):
        asked = getattr(record, field, "")
        if asked and not callable(load_target(asked, owner=owner)):
            raise PluginLoadError(f"{owner}: {asked} is not callable")


def known_errors(record: KnownErrorsProvider, *, owner: str) -> tuple[KnownError, ...]:
    """The errors that a record lists. Raises `PluginLoadError`."""
    found = load_target(record.target, owner=owner)
    if not isinstance(found, tuple) or not all(isinstance(each, KnownError) for each in found):
        raise PluginLoadError(f"{owner}: {record.target} is no tuple of KnownError")
    return found


def _contract(record: Provider) -> type | None:
    """The class that the target has to be a subclass of; None where it is a function."""
    from roll_core.spec import infer, pipeline, platform, providers, reward, tracker, train, transport

    contracts: dict[type[Provider], type] = {
        providers.PlatformProvider: platform.Platform,
        providers.TrainProvider: train.TrainStrategy,
        providers.InferProvider: infer.InferStrategy,
        providers.PipelineProvider: pipeline.Pipeline,
        providers.RewardProvider: reward.RewardFunction,
        providers.TrackerProvider: tracker.Tracker,
        providers.WeightTransportProvider: transport.WeightTransport,
    }
    return contracts.get(type(record))


def _schema(record: Provider) -> type:
    from roll_core.spec import config, providers

    schemas: dict[type[Provider], type] = {
        providers.TrainProvider: config.StrategyConfig,
        providers.InferProvider: config.StrategyConfig,
        providers.PipelineProvider: config.RunConfig,
        providers.RewardProvider: config.RewardConfig,
    }
    return schemas.get(type(record), config.Config)
