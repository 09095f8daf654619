"""Calls a user's reward function: selects its arguments and interprets its return value.

Child processes import this module too, so it imports nothing heavy.
"""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import time
from typing import TYPE_CHECKING, Any

from roll_core.errors import RewardFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

RewardValues = dict[str, Any]
"""`value`, `failure` and `detail` of a `Reward`, as plain values."""


def prepare(options: Mapping[str, Any]) -> Callable[..., RewardValues]:
    """Build the function that scores `(prompt, response, metadata)` by calling `options["function"]`.

    Raises any exception of importing the user's module, and AttributeError if it has no such function. Raises TypeError
    if the function cannot be called with a prompt and a response, or needs a column that is not in
    `options["columns"]`.
    """
    module, _, name = options["function"].partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    accepts = _check_signature(options["function"], function)
    if options.get("columns") is not None:
        _check_columns(options["function"], function, accepts, options["columns"])

    def score(prompt: str, response: str, metadata: Mapping[str, Any]) -> RewardValues:
        chosen = {key: value for key, value in metadata.items() if accepts(key)}
        return reward_values(function(prompt, response, **chosen))

    return score


def check(function: str, columns: Collection[str] | None, timeout_s: float) -> str:
    """Why the function cannot score rows with these columns (None: unknown); empty if it can.

    Loads the function in a child process. Raises `TimeoutError` if that takes longer than `timeout_s` seconds.
    """
    from roll_core.runtime.workers.reward_pool import RewardPool

    options = {"function": function, "columns": None if columns is None else sorted(columns)}
    begun = time.monotonic()
    pool = RewardPool(f"{__name__}:prepare", options, size=1, start_timeout_s=timeout_s)
    try:
        pool.start(wait=True)
    except RewardFailure as failure:
        if time.monotonic() - begun >= timeout_s:
            raise TimeoutError(f"importing {function} takes longer than {timeout_s:g} s") from failure
        return str(failure)
    finally:
        pool.close()
    return ""


def reward_values(answer: Any) -> RewardValues:
    """Convert a function's return value: a finite number, a `Reward`, or a dict with `value` or `failure`.

    Other entries of a dict become details of the reward. Raises `RewardFailure` for any other return value.
    """
    if hasattr(answer, "failed") and hasattr(answer, "detail"):  # a Reward; its class is not imported here
        answer = {**answer.detail, "value": answer.value, "failure": answer.failure}
    if not isinstance(answer, dict):
        return {"value": _number(answer), "failure": "", "detail": {}}
    detail = {str(key): each for key, each in answer.items() if key not in ("value", "failure")}
    for key, each in detail.items():
        detail[key] = each if isinstance(each, str) else _number(each, of=f"detail {key!r}")
    if answer.get("value") is None:
        failure = str(answer.get("failure") or "")
        if not failure:
            raise RewardFailure("the function returned neither a value nor a failure")
        return {"value": None, "failure": failure, "detail": detail}
    return {"value": _number(answer["value"]), "failure": "", "detail": detail}


def _number(answer: Any, of: str = "its value") -> float:
    if hasattr(answer, "item") and getattr(answer, "ndim", None) == 0:
        answer = answer.item()  # numpy's and torch's scalars
    if not isinstance(answer, numbers.Real):
        raise RewardFailure(
            f"the function returned {type(answer).__name__} as {of}: return a number, a Reward or a dict"
        )
    value = float(answer)
    if not math.isfinite(value):
        raise RewardFailure(f"the function returned {value} as {of}, which is not a finite number")
    return value


def _check_signature(name: str, function: Any) -> Callable[[str], bool]:
    """Return a predicate that is True for columns the function takes by name. Raises TypeError if it is not usable."""
    if not callable(function):
        raise TypeError(f"{name} is {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{name} is a coroutine function: make it a plain one")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return lambda key: False
    try:
        signature.bind_partial("prompt", "response")
    except TypeError as error:
        raise TypeError(f"{name}{signature} cannot be called as f(prompt, response, **metadata): {error}") from error
    parameters = list(signature.parameters.values())
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    positional = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    taken = set(positional[:2]) | {"prompt", "response"}
    return lambda key: key not in taken and (takes_all or key in named)


def _check_columns(name: str, function: Any, accepts: Callable[[str], bool], columns: Collection[str]) -> None:
    """Raise TypeError if an argument without a default is not a column of the rows."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # see `_check_signature`
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]
    for each in required:
        if accepts(each) and each not in columns:
            raise TypeError(f"{name} needs a column {each!r}, but the rows have {', '.join(sorted(columns))}")
