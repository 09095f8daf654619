"""The interface of agents: programs with a loop of their own, which call the policy at an HTTP endpoint.

    result = agent.run(task, session)       sends requests to session.base_url, in its own order and number

The endpoint records the tokens of every call. An agent exchanges text and knows nothing of training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    from roll_core.spec.environment import Message, Task
    from roll_core.types import Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The policy's endpoint for one rollout."""

    base_url: str
    """Base URL of the OpenAI API, which ends with `/v1`."""
    api_key: str
    """Secret of this rollout. It is valid until `run` returns."""
    model: str = "policy"
    """Name of the model. The endpoint accepts any name."""
    seed: int
    """Seed of the task, the same for all rollouts of a group."""
    messages: Sequence[Message] = ()
    """The conversation with the environment so far. Empty without an environment. Images are parts of OpenAI's format,
    with data URLs."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools of the environment, in the format of OpenAI's API."""
    enter: Sequence[str] = ()
    """`Opening.enter` of the environment: the command that runs a program where the episode takes place."""

    @property
    def anthropic_base_url(self) -> str:
        """Base URL for clients of the Anthropic API, which append `/v1` themselves."""
        return self.base_url.removesuffix("/v1")


AgentResult: TypeAlias = "Reward | float | str | None"
"""A reward, or the reply to the environment's messages. None: the environment gets the last reply of the policy."""


class Agent(ABC):
    """One rollout. `run` is a coroutine function, or a plain function, which may block.

    The options of the config are keyword arguments of `__init__`, which loads nothing heavy. If `run` raises, exceeds
    its deadline or never calls the endpoint, the rollout fails. A failure is never a reward of 0.
    """

    @abstractmethod
    def run(self, task: Task, session: Session) -> AgentResult | Awaitable[AgentResult]:
        """Work on the task.

        With an environment, each reply to its messages is one call, in the same instance.
        """

    def close(self) -> Awaitable[None] | None:
        """Release all resources. May be called more than once; not called if the process is killed."""
        return None


document_fields(__name__)
