"""Rewards by a user's Python functions: a score, with or without gradients, and a reader of text in images."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import numbers
import os
import re
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from roll_core.errors import ConfigError, ConfigProblem, ContractError, DataError, RewardFailure, error_text
from roll_core.types import Reward
from roll_pipeline_diffusion.rewards.base import DifferentiableReward, ImageReward
from roll_pipeline_diffusion.rewards.config import READER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from roll_pipeline_diffusion.rewards.base import Images, Row
    from roll_pipeline_diffusion.rewards.config import ImageFunctionConfig, ImageTextConfig

MAX_HANGING = 4
"""Number of hung calls at which further calls are refused."""


class FunctionReward(DifferentiableReward):
    """Calls `f(images, prompts, rows)`, or with `differentiable` `f(pixels, columns)`."""

    config: ImageFunctionConfig

    @override
    def load(self, device: str) -> None:
        super().load(device)
        self.function = _import(self.config.function, self.config.parameters, "function")
        self.calls = _Deadline(self.config.timeout_s)

    @override
    def row_arrays(self, prompt: str, row: Row) -> Mapping[str, NDArray[np.generic]]:
        return {name: _numbers(name, row) for name in self.config.numbers}

    @override
    def score_tensor(self, pixels: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        scores: Tensor = self.function(pixels, dict(arrays))
        return scores

    @override
    def score_images(self, images: Images, prompts: Sequence[str], rows: Sequence[Row]) -> Sequence[Reward]:
        if self.config.differentiable:
            rewards: Sequence[Reward] = self.calls(
                lambda: DifferentiableReward.score_images(self, images, prompts, rows)
            )
            return rewards
        values = self.calls(lambda: self.function(images, list(prompts), list(rows)))
        try:
            listed = list(values)
        except TypeError as error:
            raise ContractError(f"returned {type(values).__name__}, expected a value for each image") from error
        return [_reward(result) for result in listed]


class TextReward(ImageReward):
    """`max(0, 1 − distance / length)`: edit distance between the text read and the text wanted, of this length.

    Case and blanks do not count, as in Flow-GRPO (arXiv:2505.05470).
    """

    config: ImageTextConfig

    @override
    def load(self, device: str) -> None:
        self.reader = _import(self.config.reader, READER, "reader")
        self.calls = _Deadline(self.config.timeout_s)

    @override
    def score_images(self, images: Images, prompts: Sequence[str], rows: Sequence[Row]) -> Sequence[Reward]:
        targets = [self._wanted(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
        texts = self.calls(lambda: [self.reader(image) for image in images])
        return [_compare(read, text) for read, text in zip(texts, targets, strict=True)]

    def _wanted(self, prompt: str, row: Row) -> str:
        text = row.get(self.config.text)
        if text is None:
            quoted = re.search(r'"([^"]+)"|“([^”]+)”', prompt)
            text = (quoted[1] or quoted[2]) if quoted else None
        if not isinstance(text, str) or not _letters(text):
            raise DataError(f"column {self.config.text!r} is {text!r}, and prompt {prompt!r} has no quoted text")
        return text


@functools.cache
def _rapidocr() -> Callable[..., Any]:
    from rapidocr import RapidOCR

    engine: Callable[..., Any] = RapidOCR(params={"Global.log_level": "warning"})
    return engine


def read_text(image: NDArray[np.uint8]) -> str:
    """Text in an image, `[H, W, 3]`, by RapidOCR, whose wheel contains its weights. Boxes are joined by blanks."""
    recognized = _rapidocr()(np.ascontiguousarray(image[..., ::-1]))  # the library expects BGR
    return " ".join(recognized.txts or ())


def _compare(read: Any, target: str) -> Reward:
    if not isinstance(read, str):
        raise ContractError(f"the reader returned {type(read).__name__}, expected str")
    one, other = _letters(read), _letters(target)
    return Reward(value=max(0.0, 1 - edit_distance(one, other) / len(other)), detail={"read": read[:200]})


def _letters(text: str) -> str:
    return "".join(text.lower().split())


def edit_distance(one: str, other: str) -> int:
    """Minimum number of inserted, deleted and replaced letters (Levenshtein)."""
    before = list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        now = [row]
        for column, other_letter in enumerate(other, 1):
            now.append(min(before[column] + 1, now[-1] + 1, before[column - 1] + (letter != other_letter)))
        before = now
    return before[-1]


def check(name: str, *arguments: str) -> None:
    """Print why a function cannot be called with these arguments, as JSON. For the child process of `check_code`."""
    try:
        _import(name, arguments, "")
        problem = ""
    except ConfigError as error:
        problem = error.problems[0].message
    sys.stdout.write("\n" + json.dumps({"problem": problem}) + "\n")


def _import(name: str, arguments: tuple[str, ...], key: str) -> Callable[..., Any]:
    """Import a function and check that it can be called. Raises `ConfigError` with the key."""
    module, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        function: Any = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"{type(function).__name__}, expected a plain function")
        inspect.signature(function).bind(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing user code may raise anything, SystemExit included
        message = f"{name} cannot be called as f({', '.join(arguments)}): {type(error).__name__}: {error}"
        hint = f"it is imported with the working directory {here} first on the module path"
        raise ConfigError([ConfigProblem("image reward", key, message, hint, code="ROLL-C041")]) from error
    return function  # type: ignore[no-any-return]


class _Deadline:
    """Calls functions in threads, for at most some seconds. A call that hangs is abandoned; it cannot be stopped."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._hanging: list[threading.Thread] = []

    def __call__(self, function: Callable[[], Any]) -> Any:
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if len(self._hanging) >= MAX_HANGING:
            raise RewardFailure(f"{len(self._hanging)} calls of the function hang, which cannot be stopped")
        results: list[Any] = []

        def run() -> None:
            try:
                results.append((function(), None))
            except BaseException as error:  # user code; the caller reports it
                results.append((None, error))

        thread = threading.Thread(target=run, name="image-reward", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if not results:
            self._hanging.append(thread)
            raise RewardFailure(f"scoring exceeded timeout_s {self._timeout_s:g} s")
        result, error = results[0]
        if isinstance(error, Exception):
            raise error
        if error is not None:  # such as SystemExit, which must not end the run
            raise RewardFailure(f"{type(error).__name__}: {error_text(error)}") from error
        return result


def _reward(result: Any) -> Reward:
    """A function's value: a number, a `Reward`, or a dict with `value` or `failure` and details."""
    if isinstance(result, Reward):
        return result
    if isinstance(result, dict):
        detail = {str(key): number for key, number in result.items() if key not in ("value", "failure")}
        detail = {
            key: number if isinstance(number, str) else _number(number, f"detail {key!r}")
            for key, number in detail.items()
        }
        if result.get("failure") or result.get("value") is None:
            return Reward(
                value=None, failure=str(result.get("failure") or "the function returned no value"), detail=detail
            )
        return Reward(value=_number(result["value"], "value"), detail=detail)
    return Reward(value=_number(result, "value"))


def _number(number: Any, what: str) -> float:
    if hasattr(number, "item") and getattr(number, "ndim", None) == 0:
        number = number.item()  # numpy's and torch's scalars
    if not isinstance(number, numbers.Real):
        raise ContractError(f"returned {type(number).__name__} as {what}, expected a number, a Reward or a dict")
    return float(number)


def _numbers(name: str, row: Row) -> NDArray[np.generic]:
    try:
        array = np.asarray(row[name], np.float32)
    except KeyError:
        raise DataError(f"a row has no column {name!r}, only {', '.join(sorted(row))}") from None
    except (TypeError, ValueError) as error:
        raise DataError(f"column {name!r} is {row[name]!r}, expected numbers") from error
    if not np.isfinite(array).all():
        raise DataError(f"column {name!r} is {row[name]!r}, expected finite numbers")
    return array
