"""An agent in the process that runs it: the user's function or class, with checked results. Light."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from roll_core.types import Reward
from roll_pipeline_agentic.environment_process import load

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from roll_core.spec.agent import Session
    from roll_core.spec.environment import Task


class HostedAgent:
    """An agent of a class or function, whose result is a `Reward`, a text or None."""

    def __init__(self, target: str, options: Mapping[str, Any]) -> None:
        agent = load(target)
        self._agent = agent(**options) if isinstance(agent, type) else None
        self._run = partial(agent, **options) if self._agent is None else self._agent.run

    @property
    def is_async(self) -> bool:
        """True if it is a coroutine function."""
        function = self._run.func if isinstance(self._run, partial) else self._run
        return inspect.iscoroutinefunction(function)

    def run(self, task: Task, session: Session) -> Any:
        """Run the agent."""
        result = self._run(task, session)
        return _awaited(result) if inspect.isawaitable(result) else _normalised(result)

    def close(self) -> Any:
        """Close the agent."""
        return None if self._agent is None else self._agent.close()


async def _awaited(result: Awaitable[Any]) -> Any:
    return _normalised(await result)


def _normalised(result: Any) -> Reward | str | None:
    """The result of an agent, with a number as a reward."""
    if result is None or isinstance(result, Reward | str):
        return result
    if isinstance(result, bool | int | float):
        return Reward(value=float(result))
    raise TypeError(f"returned {type(result).__name__}, expected a number, a Reward, a text or None")
