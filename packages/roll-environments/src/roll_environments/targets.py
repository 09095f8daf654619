"""Loads functions and classes that a config names as `module:attribute`, and names what raised in them. Light."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class WrappedError(RuntimeError):
    """An error raised by code that an adapter calls. The message names this code and its package."""


def load(target: str) -> Any:
    """Import the object that `module:attribute` names. Also finds modules in the working directory.

    Raises `ValueError` if there is none or its module raises on import.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"found {target!r}, expected module:attribute")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        value: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code, which may also exit
        raise ValueError(f"importing {module_name} failed: {described(error)}") from error
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise ValueError(f"module {module_name} has no {attribute!r}")
        value = getattr(value, name)
    return value


def importable(target: str) -> str:
    """Return `target` if it names something callable. Raises `ValueError`."""
    if not callable(load(target)):
        raise ValueError(f"{target} is not callable")
    return target


@contextmanager
def calls_to(what: Any, stage: str) -> Iterator[None]:
    """Errors in this block are raised as `WrappedError` that names `what`, a class, object or description."""
    try:
        yield
    except WrappedError:
        raise
    except Exception as error:
        raise wrapped(what, stage, error) from error


def wrapped(what: Any, stage: str, error: BaseException) -> WrappedError:
    """The error that names the code which raised `error`."""
    return WrappedError(f"{_name(what)}: {stage}: {described(error)}")


def _name(what: Any) -> str:
    if isinstance(what, str):
        return what
    cls = what if hasattr(what, "__qualname__") else type(what)
    return f"{cls.__module__}:{cls.__qualname__}{_distribution(cls.__module__)}"


def _distribution(module: str) -> str:
    """` of NAME VERSION` of the distribution that provides a module; empty for files of the user."""
    from importlib import metadata

    names = metadata.packages_distributions().get(module.partition(".")[0], [])
    return f" of {names[0]} {metadata.version(names[0])}" if names else ""


def described(error: BaseException) -> str:
    """Class and message of an exception, on one line."""
    reason = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if reason else ''}{reason}"
