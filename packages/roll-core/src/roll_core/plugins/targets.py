"""Imports what a record points at, in the process that uses it."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

from roll_core.errors import PluginLoadError

T = TypeVar("T")


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
