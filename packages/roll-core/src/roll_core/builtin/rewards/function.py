"""`reward: function`: scores samples with a user's Python function.

If the function hangs, crashes or raises, the sample's reward is a failure. It is never 0, and it never stops the run.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from roll_core.builtin.rewards.user_function import Verdict, prepare
from roll_core.errors import ConfigError, ConfigProblem, DataError, RewardFailure
from roll_core.runtime.workers.reward_pool import RewardPool
from roll_core.runtime.workers.reward_process import describe
from roll_core.spec.reward import RewardFunction
from roll_core.types import Reward

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roll_core.builtin.rewards.config import FunctionConfig
    from roll_core.spec.reward import RewardRequest

MAX_HANGING = 8
"""Number of hung threads at which `isolation: none` refuses further calls."""


class FunctionReward(RewardFunction):
    """Calls `f(prompt, response, **metadata)`, which returns a number, a `Reward`, or a dict with `value`.

    Only columns that the function names as parameters are passed, or all columns if it takes `**metadata`.
    """

    config: FunctionConfig

    @override
    def start(self) -> None:
        """Import the function's module. Raises `ConfigError` if that fails."""
        config = self.config
        options = {"function": config.function}
        if config.isolation == "none":
            self._judge: _InThisProcess | _InProcesses = _InThisProcess(self._load_here(config, options))
            return
        self._judge = _InProcesses(config, options)
        try:
            self._judge.pool.start(wait=True)
        except RewardFailure as failure:
            self.close()
            raise _cannot_use(config, str(failure)) from failure

    @override
    def score(self, request: RewardRequest) -> Reward:
        """Score one sample.

        Raises `RewardFailure` with the cause if the function raises, hangs, crashes or returns no finite number.
        """
        arguments = {"prompt": request.prompt, "response": request.response, "metadata": request.metadata}
        found = self._judge(arguments, self.config.timeout_s)
        return Reward(value=found["value"], failure=found["failure"], detail=found["detail"])

    @override
    def close(self) -> None:
        judge = getattr(self, "_judge", None)
        if isinstance(judge, _InProcesses):
            judge.pool.close()

    def _load_here(self, config: FunctionConfig, options: Mapping[str, Any]) -> Callable[..., Verdict]:
        here = os.getcwd()
        if here not in sys.path:
            sys.path.insert(0, here)
        try:
            return prepare(options)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # importing user code may raise anything, SystemExit included
            raise _cannot_use(config, describe(error)) from error


class _InProcesses:
    """Runs the function in child processes, which can always be killed."""

    def __init__(self, config: FunctionConfig, options: Mapping[str, Any]) -> None:
        self.pool = RewardPool(
            "roll_core.builtin.rewards.user_function:prepare",
            options,
            size=config.processes,
            start_timeout_s=config.start_timeout_s,
            memory_mb=config.memory_limit_mb,
        )

    def __call__(self, arguments: Mapping[str, Any], timeout_s: float) -> Verdict:
        metadata = {str(name): _plain(name, value) for name, value in arguments["metadata"].items()}
        return cast("Verdict", self.pool.call({**arguments, "metadata": metadata}, timeout_s))


class _InThisProcess:
    """Runs the function in threads of the worker. A hung call is abandoned; its thread cannot be stopped."""

    def __init__(self, judge: Callable[..., Verdict]) -> None:
        self._judge = judge
        self._hanging: list[threading.Thread] = []

    def __call__(self, arguments: Mapping[str, Any], timeout_s: float) -> Verdict:
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if len(self._hanging) >= MAX_HANGING:
            raise RewardFailure(
                f"{len(self._hanging)} calls of the function hang: isolation: process would end them when they do"
            )
        answers: list[Verdict | BaseException] = []
        thread = threading.Thread(target=self._answer, args=(arguments, answers), daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not answers:
            self._hanging.append(thread)
            raise RewardFailure(f"judging took longer than {timeout_s:g} s and was given up")
        answer = answers[0]
        if isinstance(answer, RewardFailure):
            raise answer
        if isinstance(answer, BaseException):
            raise RewardFailure(describe(answer)) from answer
        return answer

    def _answer(self, arguments: Mapping[str, Any], answers: list[Verdict | BaseException]) -> None:
        try:
            answers.append(self._judge(**arguments))
        except BaseException as error:  # user code; the caller reports the exception
            answers.append(error)


def _cannot_use(config: FunctionConfig, reason: str) -> ConfigError:
    return ConfigError(
        [
            ConfigProblem(
                where="reward function",
                key="function",
                message=f"{config.function} cannot be used: {reason}",
                hint=f"it is imported with the working directory {os.getcwd()} first on the module path",
                code="ROLL-C041",
            )
        ]
    )


def _plain(name: str, value: Any) -> Any:
    """Convert numpy arrays and scalars to lists and numbers. Raises `DataError` if the value is not JSON then."""
    value = value.tolist() if hasattr(value, "tolist") else value
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"column {name!r} holds {type(value).__name__}, which cannot be sent to the reward function's process"
            f" ({error}): leave the column out, or set isolation: none"
        ) from error
    return value
