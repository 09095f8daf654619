"""Calls a user's reward function: selects its arguments and interprets its return value.

    signature   call                                                           returns
    roll        f(prompt, response, **columns)                                 a number, a `Reward`, a dict
    trl         f(prompts=[…], completions=[…], completion_ids=[…], **columns)  a list with a number or None
    verl        f(data_source=…, solution_str=…, ground_truth=…, extra_info=…)  a number, or a dict with `score`
    openrlhf    f([query], [prompt], [label])                                  a dict with `rewards`, or these

The calls are those of `GRPOTrainer._calculate_rewards` of TRL, of `NaiveRewardManager` of verl, and of
`SingleTurnAgentExecutor` of OpenRLHF, with one sample.

Child processes import this module too, so it imports nothing heavy.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import io
import json
import math
import numbers
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.errors import RewardFailure, closest

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Mapping, Sequence

IMAGES = "images"
"""Parameter of functions that read the images of a sample."""
RewardValues = dict[str, Any]
"""`value`, `failure` and `detail` of a `Reward`, as plain values."""


@dataclass(frozen=True)
class Scorer:
    """Scores a sample by a user's function."""

    score: Callable[..., RewardValues]
    facts: Mapping[str, Any]
    """`images`: True if the function reads images. Others need not be sent."""

    def __call__(self, **sample: Any) -> RewardValues:
        """Score `(prompt, response, metadata, messages, completion_ids, images)`; images are base64."""
        return self.score(**sample)


def prepare(options: Mapping[str, Any]) -> Scorer:
    """Build the scorer that calls `options["function"]`.

    Raises any exception of importing the user's module, and AttributeError if it has no such function. Raises TypeError
    if the function cannot be called as `options["signature"]` requires, or needs a column that is not in
    `options["columns"]`.
    """
    name = options["function"]
    module, _, path = name.partition(":")
    function: Any = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(function, part):
            close = closest(part, dir(function))
            raise AttributeError(f"{module} has no {part!r}{f'; did you mean {close}?' if close else ''}")
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{name} is {type(function).__name__}, not a function")
    called = options.get("signature", "auto")
    if called == "auto":
        called = _signature_of(function)
    score = _adapted(name, function, called, options.get("columns"), options.get("label"))
    return Scorer(score, {IMAGES: IMAGES in _parameters(function)})


def _adapted(
    name: str, function: Any, called: str, columns: Collection[str] | None, label: str | None
) -> Callable[..., RewardValues]:
    if called == "openrlhf":
        return _openrlhf(name, function, columns, label)
    if label is not None:
        raise TypeError(f"{name} has no labels: remove `label`, or set signature: openrlhf")
    adapter = _ADAPTERS.get(called)
    if adapter is None:
        accepts, takes_images = _check_signature(name, function), IMAGES in _parameters(function)
        if columns is not None:
            _check_columns(name, function, accepts, columns)

        def score(
            prompt: str, response: str, metadata: Mapping[str, Any], images: Sequence[str] = (), **others: Any
        ) -> RewardValues:
            chosen = {key: value for key, value in metadata.items() if accepts(key)}
            if takes_images and (images or IMAGES not in metadata):
                chosen[IMAGES] = _images(images)
            try:
                answer = function(prompt, response, **chosen)
            except Exception as error:
                if empty := [key for key, value in chosen.items() if value is None]:
                    error.add_note(f"the row has no value for {', '.join(empty)}")
                raise
            return reward_values(answer, name)

        return score
    return adapter(name, function, columns)


def _images(images: Sequence[str]) -> list[Any]:
    """Images of Pillow, in RGB, from base64."""
    from PIL import Image

    return [Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB") for image in images]


def check(
    function: str,
    columns: Collection[str] | None,
    timeout_s: float,
    *,
    signature: str = "auto",
    label: str | None = None,
) -> str:
    """Why the function cannot score rows with these columns (None: unknown); empty if it can.

    Loads the function in a child process. Raises `TimeoutError` if that takes longer than `timeout_s` seconds.
    """
    from roll_core.reward_pool import RewardPool

    named = None if columns is None else sorted(columns)
    options = {"function": function, "signature": signature, "columns": named, "label": label}
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


def reward_values(answer: Any, name: str) -> RewardValues:
    """Convert what function `name` returned: a finite number, a `Reward`, or a dict with `value` or `failure`.

    Other entries of a dict become details of the reward. Raises `RewardFailure` for any other return value.
    """
    if hasattr(answer, "failed") and hasattr(answer, "detail"):  # a Reward; its class is not imported here
        answer = {**answer.detail, "value": answer.value, "failure": answer.failure}
    if not isinstance(answer, dict):
        return {"value": _number(answer, name), "failure": "", "detail": {}}
    detail = {str(key): number for key, number in answer.items() if key not in ("value", "failure")}
    for key, number in detail.items():
        detail[key] = number if isinstance(number, str) else _number(number, name, of=f"detail {key!r}")
    if failure := str(answer.get("failure") or ""):  # also beside a value, which it makes doubtful
        return {"value": None, "failure": failure, "detail": detail}
    if answer.get("value") is None:
        raise RewardFailure(f"{name} returned neither a value nor a failure")
    return {"value": _number(answer["value"], name), "failure": "", "detail": detail}


def _number(answer: Any, name: str, of: str = "its value") -> float:
    if hasattr(answer, "item") and getattr(answer, "ndim", None) == 0:
        answer = answer.item()  # numpy's and torch's scalars
    if not isinstance(answer, numbers.Real):
        raise RewardFailure(f"{name} returned {type(answer).__name__} as {of}: return a number, a Reward or a dict")
    value = float(answer)
    if not math.isfinite(value):
        raise RewardFailure(f"{name} returned {value} as {of}, which is not a finite number")
    return value


def _check_signature(name: str, function: Any) -> Callable[[str], bool]:
    """Return a predicate that is True for columns the function takes by name. Raises TypeError if it is not usable."""
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
    named = {
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    positional = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    taken = set(positional[:2]) | {"prompt", "response"}
    return lambda key: key not in taken and (takes_all or key in named)


def _check_columns(name: str, function: Any, accepts: Callable[[str], bool], columns: Collection[str]) -> None:
    """Raise TypeError if an argument without a default is not a column of the rows."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # see `_check_signature`
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]
    for column in required:
        if accepts(column) and column not in (*columns, IMAGES):
            raise TypeError(f"{name} needs a column {column!r}, but the rows have {', '.join(sorted(columns))}")


# -- functions written for other frameworks ----------------------------------------------------------------------------


def _signature_of(function: Any) -> str:
    """The framework that a function was written for, by the names of its parameters."""
    names = _parameters(function)
    if {"completions", "completion_ids"} & names.keys():
        return "trl"
    if "solution_str" in names:
        return "verl"
    return "openrlhf" if {"queries", "prompts"} <= names.keys() else "roll"


def _trl(name: str, function: Any, columns: Collection[str] | None) -> Callable[..., RewardValues]:
    """Adapter for `f(completions, prompts=None, **columns) -> list[float | None]`. None means: not applicable.

    If a column of the row has chat messages, the prompt and the completion are messages; otherwise they are texts.
    """
    reserved = {"prompt", "completion"}
    takes_images = IMAGES in _parameters(function)
    accepts = _accepted(name, function, {"prompts", "completions", "completion_ids", IMAGES}, columns, reserved)
    run = _Runner(function)

    def score(
        prompt: str,
        response: str,
        metadata: Mapping[str, Any],
        messages: Sequence[Any],
        completion_ids: Sequence[int],
        images: Sequence[str] = (),
    ) -> RewardValues:
        chat = any(_is_chat(_of_json(value)) for value in metadata.values())
        text = messages[-1]["content"] if messages else prompt
        arguments: dict[str, Any] = {key: [value] for key, value in metadata.items() if key not in reserved}
        arguments["prompts"] = [list(messages) if chat else text]
        arguments["completions"] = [[{"role": "assistant", "content": response}] if chat else response]
        arguments["completion_ids"] = [list(completion_ids)]
        if takes_images and (images or IMAGES not in metadata):
            arguments[IMAGES] = [_images(images)]
        answer = run({key: value for key, value in arguments.items() if accepts(key)})
        answer = answer.tolist() if hasattr(answer, "tolist") else answer
        if not isinstance(answer, (list, tuple)):
            raise RewardFailure(f"{name} returned {type(answer).__name__}, expected a list of one number")
        if len(answer) != 1:
            raise RewardFailure(f"{name} returned {len(answer)} values for 1 completion")
        if answer[0] is None:
            raise RewardFailure(f"{name} returned None: it does not apply to this sample")
        return {"value": _number(answer[0], name), "failure": "", "detail": {}}

    return score


def _verl(name: str, function: Any, columns: Collection[str] | None) -> Callable[..., RewardValues]:
    """Adapter for `f(data_source, solution_str, ground_truth, extra_info=None)`.

    The ground truth is `reward_model["ground_truth"]` of verl's rows, or the column `ground_truth`. Other entries than
    `score` of a returned dict become details.
    """
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    parameters = _parameters(function)
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise TypeError(f"{name} cannot be called as f({', '.join(names)}): {error}") from error
    if columns is not None:
        for column, others in (("data_source", ()), ("ground_truth", ("reward_model",))):
            default = parameters[column].default if column in parameters else None
            if default is inspect.Parameter.empty and not {column, *others} & set(columns):
                raise TypeError(f"{name} needs a column {column!r}, but the rows have {', '.join(sorted(columns))}")
    run = _Runner(function)

    def score(prompt: str, response: str, metadata: Mapping[str, Any], **others: Any) -> RewardValues:
        row = metadata.get("reward_model")
        truth = row.get("ground_truth") if isinstance(row, dict) else metadata.get("ground_truth")
        extra = metadata.get("extra_info")
        arguments = {"solution_str": response, "ground_truth": truth, "data_source": metadata.get("data_source")}
        answer = run({**arguments, "extra_info": dict(extra) if extra else {}})
        if not isinstance(answer, dict):
            return {"value": _number(answer, name), "failure": "", "detail": {}}
        if "score" not in answer:
            raise RewardFailure(f"{name} returned a dict without 'score': {', '.join(map(str, answer))}")
        detail = {str(key): _detail(value) for key, value in answer.items() if key != "score"}
        return {"value": _number(answer["score"], name), "failure": "", "detail": detail}

    return score


def _openrlhf(
    name: str, function: Any, columns: Collection[str] | None, label: str | None
) -> Callable[..., RewardValues]:
    """Adapter for `f(queries, prompts, labels) -> {"rewards": …, "scores": …, "extra_logs": {…}}`.

    `label` is a column that each row needs. Without it, rows without a column `label` have an empty text.
    A query is the prompt and the response as text, without the response's end token. The value is the reward; scores
    and logs become details. Older functions return the rewards alone.
    """
    try:
        inspect.signature(function).bind(["query"], ["prompt"], ["label"])
    except ValueError:  # see `_check_signature`
        pass
    except TypeError as error:
        raise TypeError(f"{name} cannot be called as f(queries, prompts, labels): {error}") from error
    if label is not None and columns is not None and label not in columns:
        raise TypeError(f"{name} needs the column {label!r}, but the rows have {', '.join(sorted(columns))}")

    def score(prompt: str, response: str, metadata: Mapping[str, Any], **others: Any) -> RewardValues:
        truth = metadata.get(label or "label")
        if truth is None and label is not None:
            raise RewardFailure(f"the row has no value for {label}, which {name} needs")
        answer = function([prompt + response], [prompt], ["" if truth is None else truth])
        if not isinstance(answer, dict):
            answer = {"rewards": answer}
        if answer.get("rewards") is None:
            raise RewardFailure(f"{name} returned a dict without 'rewards': {', '.join(map(str, answer))}")
        logs = answer.get("extra_logs") or {}
        scores = {} if answer.get("scores") is None else {"scores": answer["scores"]}
        detail = {str(key): _detail(_only(value)) for key, value in {**logs, **scores}.items()}
        return {"value": _number(_only(answer["rewards"], name), name), "failure": "", "detail": detail}

    return score


def _only(values: Any, name: str = "") -> Any:
    """The one element of a list, an array or a tensor; other values as they are."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or (len(values) != 1 and not name):
        return values
    if len(values) != 1:
        raise RewardFailure(f"{name} returned {len(values)} rewards for 1 query")
    return _only(values[0], name)


_ADAPTERS = {"trl": _trl, "verl": _verl}


class _Runner:
    """Calls a plain or a coroutine function with keywords. Coroutines of a process share one event loop."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._shared: asyncio.Runner | None = None

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        result = self._function(**arguments)
        if not inspect.iscoroutine(result):
            return result
        import asyncio

        if threading.current_thread() is not threading.main_thread():  # `isolation: none` calls concurrently
            return asyncio.run(result)
        self._shared = self._shared or asyncio.Runner()
        return self._shared.run(result)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # see `_check_signature`
        return {}


def _accepted(
    name: str, function: Any, passed: Collection[str], columns: Collection[str] | None, reserved: Collection[str]
) -> Callable[[str], bool]:
    """Predicate of the keywords that a function takes. Raises TypeError if it needs another one."""
    parameters = _parameters(function).values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"{name} takes {parameter.name!r} only by position, and TRL passes every argument by name")
        required = parameter.name in named and parameter.default is parameter.empty and parameter.name not in passed
        if required and (parameter.name in reserved or (columns is not None and parameter.name not in columns)):
            known = ", ".join(sorted({*passed, *(columns or ())} - {*reserved}))
            raise TypeError(f"{name} needs {parameter.name!r}, expected only {known}")
    return lambda key: takes_all or key in named


def _is_chat(value: Any) -> bool:
    """True for chat messages: a list of dicts with `role` and `content`."""
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)
    )


def _of_json(value: Any) -> Any:
    """The list of a JSON text, as rows with chats may have it; other values as they are."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _detail(value: Any) -> float | str:
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    return value if isinstance(value, str) else str(value)
