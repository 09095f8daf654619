"""Imports the object that a record refers to, in the process that uses it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from roll_core.errors import PluginLoadError, one_line
from roll_core.plugins.records import kind_of
from roll_core.spec.diagnostics import KnownError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from roll_core.spec.config import Config
    from roll_core.spec.providers import KnownErrorsProvider, Provider

T = TypeVar("T")
M = TypeVar("M", bound="BaseModel")


def load_target(target: str, *, owner: str) -> Any:
    """Import and return the object that `"module:attribute"` names.

    `owner` identifies the part in errors: `"infer strategy 'acme' of roll-infer-acme 1.2"`. Raises `PluginLoadError` if
    the target is malformed, does not exist, or its module raises on import. The module's exception is chained,
    SystemExit included.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise PluginLoadError(f"{owner}: target {target!r} is not 'module:attribute'")
    try:
        value: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # third-party code: SystemExit must not end the run silently
        raise PluginLoadError(f"{owner}: importing {module_name} failed: {one_line(error)}") from error
    for name in attribute.split("."):
        try:
            value = getattr(value, name)
        except AttributeError as error:
            raise PluginLoadError(f"{owner}: {module_name} has no {attribute!r}") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module that imports its attributes when they are read
            raise PluginLoadError(f"{owner}: importing {target} failed: {one_line(error)}") from error
    return value


def load_class(target: str, base: type[T], *, owner: str) -> type[T]:
    """Import the class that `target` names. Raises `PluginLoadError` if it is missing or no subclass of `base`."""
    cls = load_target(target, owner=owner)
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise PluginLoadError(f"{owner}: {target} is not a subclass of {base.__module__}.{base.__qualname__}")
    return cls


def data_file(target: str, *, owner: str) -> Path:
    """Path of the file or folder that `"package:name"` names. Imports neither the package nor its parent packages.

    Raises `PluginLoadError` if the package or the file does not exist.
    """
    package, _, name = target.partition(":")
    top, *below = package.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError) as error:
        raise PluginLoadError(f"{owner}: there is no package {package}: {error}") from error
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (file := Path(folder, *below, name)).exists():
            return file.resolve()
    raise PluginLoadError(f"{owner}: there is no file {name} in the package {package}")


def schema_of(record: Provider, base: type[M], *, owner: str) -> type[M]:
    """Config schema of a record, or `base` if the record names none. Raises `PluginLoadError`.

    For a function of the user, see `options_schema`.
    """
    return load_class(record.config, base, owner=owner) if record.config else base


def options_schema(record: Provider) -> type[Config]:
    """Schema of the options of a user's code: `pg_variant: my_losses:gspo`, `environment: my_env:Class`.

    The options are a function's parameters after those of the contract, or all parameters of a class, with their
    names, types and defaults, see `signature_schema`.

    Raises `PluginLoadError` if the code cannot be imported, or called as its contract, or if pydantic cannot validate
    an annotation.
    """
    from roll_core.spec.algorithms import signature_schema
    from roll_core.spec.providers import AgentProvider, EnvironmentProvider, PromptSamplerProvider

    contract = load_target(kind_of(type(record)).contract, owner="roll-core")
    callee: Any = load_target(record.target, owner=record.name)
    contract_parameters: list[str] = []
    is_class = isinstance(record, (EnvironmentProvider, PromptSamplerProvider))
    if is_class or (isinstance(record, AgentProvider) and isinstance(callee, type)):
        load_class(record.target, contract, owner=record.name)
    else:
        called = contract.run if isinstance(record, AgentProvider) else contract.__call__
        contract_parameters = list(inspect.signature(called).parameters)[1:]
    try:
        return signature_schema(callee, contract_parameters)
    except TypeError as error:
        raise PluginLoadError(f"{record.target} {error}") from error


def known_errors(record: KnownErrorsProvider, *, owner: str) -> tuple[KnownError, ...]:
    """Known errors that a record lists. Raises `PluginLoadError` unless the target is a tuple of `KnownError`."""
    errors = load_target(record.target, owner=owner)
    if not isinstance(errors, tuple) or not all(isinstance(error, KnownError) for error in errors):
        raise PluginLoadError(f"{owner}: {record.target} is not a tuple of KnownError")
    return errors
