"""`reward: function`: scores samples with a user's Python function.

If the function hangs, crashes or raises, the sample's reward is a failure. It is never 0, and it never stops the run.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.data.media import with_parts
from roll_core.errors import ConfigError, ConfigProblem, DataError, RewardFailure
from roll_core.reward_pool import RewardPool
from roll_core.reward_process import describe
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward
from roll_rewards.user_function import Scorer, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roll_core.spec.rollout import RewardRequest
    from roll_rewards.function_config import FunctionConfig
    from roll_rewards.user_function import RewardValues

MAX_HANGING = 8
"""Number of hung threads at which `isolation: none` refuses further calls."""


class FunctionReward(RewardFunction):
    """Calls `f(prompt, response, **metadata)`, which returns a number, a `Reward`, or a dict with `value`.

    Only columns that the function names as parameters are passed, or all columns if it takes `**metadata`. Functions
    written for TRL, verl or OpenRLHF are called as there, see `user_function`. Functions with a parameter `images` get
    the sample's images, as a list of Pillow's.
    """

    config: FunctionConfig
    _pool: RewardPool | None = None
    """Child processes, which can always be killed; None with `isolation: none`."""

    @override
    def start(self) -> None:
        """Import the function's module. Raises `ConfigError` if that fails."""
        config = self.config
        options = {"function": config.function, "signature": config.signature, "label": config.label}
        if config.isolation == "none":
            scorer = _load_here(config, options)
            self._in_worker, self._facts = _InWorker(scorer), scorer.facts
            return
        self._pool = RewardPool(
            "roll_rewards.user_function:prepare",
            options,
            size=config.processes,
            start_timeout_s=config.start_timeout_s,
            memory_mb=config.memory_limit_mb,
        )
        try:
            self._facts = self._pool.start(wait=True)
        except RewardFailure as failure:
            self.close()
            raise _cannot_use(config, str(failure)) from failure

    @override
    def score(self, request: RewardRequest) -> Reward:
        """Score one sample.

        Raises `RewardFailure` with the cause if the function raises, hangs, crashes or returns no finite number.
        """
        media = request.sample.media if self._facts["images"] else ()
        arguments: dict[str, Any] = {
            "prompt": request.prompt,
            "response": request.response,
            "messages": with_parts(request.messages, data=False),
            "images": [base64.b64encode(item.read()).decode("ascii") for item in media],
            "completion_ids": request.sample.response_ids.tolist(),
        }
        if self._pool is None:
            result = self._in_worker({**arguments, "metadata": request.metadata}, self.config.timeout_s)
        else:
            arguments["metadata"] = {str(name): _plain(name, value) for name, value in request.metadata.items()}
            result = self._pool.call(arguments, self.config.timeout_s)
        return Reward(value=result["value"], failure=result["failure"], detail=result["detail"])

    @override
    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


class _InWorker:
    """Runs the function in threads of the worker. A hung call is abandoned; its thread cannot be stopped."""

    def __init__(self, function: Callable[..., RewardValues]) -> None:
        self._function = function
        self._hanging: list[threading.Thread] = []

    def __call__(self, arguments: Mapping[str, Any], timeout_s: float) -> RewardValues:
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if len(self._hanging) >= MAX_HANGING:
            raise RewardFailure(
                f"{len(self._hanging)} calls of the function hang, which cannot be stopped; set isolation: process"
            )
        results: list[RewardValues | BaseException] = []
        thread = threading.Thread(target=self._run, args=(arguments, results), name="reward-call", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not results:
            self._hanging.append(thread)
            raise RewardFailure(f"scoring exceeded timeout_s {timeout_s:g} s")
        result = results[0]
        if isinstance(result, RewardFailure):
            raise result
        if isinstance(result, BaseException):
            raise RewardFailure(describe(result)) from result
        return result

    def _run(self, arguments: Mapping[str, Any], results: list[RewardValues | BaseException]) -> None:
        try:
            results.append(self._function(**arguments))
        except BaseException as error:  # user code; the caller reports the exception
            results.append(error)


def _load_here(config: FunctionConfig, options: Mapping[str, Any]) -> Scorer:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return prepare(options)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing user code may raise anything, SystemExit included
        raise _cannot_use(config, describe(error)) from error


def _cannot_use(config: FunctionConfig, reason: str) -> ConfigError:
    message = f"{config.function} cannot be used: {reason}"
    hint = f"it is imported with the working directory {os.getcwd()} first on the module path"
    return ConfigError([ConfigProblem("reward function", "function", message, hint, code="ROLL-C041")])


def _plain(name: str, value: Any) -> Any:
    """Convert numpy arrays and scalars to lists and numbers. Raises `DataError` if the value is not JSON then."""
    value = value.tolist() if hasattr(value, "tolist") else value
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"column {name!r} has a {type(value).__name__}, which cannot be sent to the reward function's process"
            f" ({error}): remove the column, or set isolation: none"
        ) from error
    return value
