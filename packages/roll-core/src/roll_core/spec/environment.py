"""The interface of environments: an episode of chat messages, with rewards of turns and of the whole episode.

    opening = environment.reset(task, seed)
    while not turn.done and not turn.truncated:
        turn = environment.step(reply)          the model's reply to the messages so far
    reward = environment.score()
    environment.close()

An environment exchanges text and images, and never sees tokens. One instance runs one episode. In an episode with
several players, each result names the player of the next turn, and each player has a conversation of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from roll_core.types import FinishReason, Reward

Message: TypeAlias = Mapping[str, Any]
"""A chat message with the keys `role` and `content`, as plain JSON values.

Images are parts of a content that is a list, in the formats of OpenAI and Hugging Face. Or `media` has them: a list of
images of Pillow, bytes or `roll_core.types.Media`, in the order of their places `roll_core.spec.rollout.IMAGE` in the
content. Paths and URLs are not read."""
Task: TypeAlias = Mapping[str, Any]
"""What an episode is about, as plain JSON values. Empty for environments that create their task from the seed."""
State: TypeAlias = str | int
"""Names a state of the environment, so that turns which begin in the same state can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """First messages of an episode."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of tools for the chat template, in the format of OpenAI's API."""
    state: State | None = None
    """State in which the first turn begins. None: the digest of `messages`."""
    players: Sequence[str] = ()
    """Names of the players, if there are several, in the order of the rules. The policy plays all of them."""
    player: str = ""
    """Player of the first turn, who gets `messages`. Empty: the first of `players`."""
    enter: Sequence[str] = ()
    """Command that runs a program where the episode takes place, such as a container; the program and its arguments
    follow. An agent that is a program is started by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A message of the model."""

    text: str
    """Without special tokens, reasoning and well-formed tool calls."""
    finish_reason: FinishReason = "stop"
    """`length` if the reply was cut at the maximum number of tokens."""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """Calls of tools in the reply, in the format of OpenAI's API: `id`, `type`, and `function` with `name` and
    `arguments` as JSON text."""
    reasoning: str = ""
    """Text of the reasoning block."""
    parse_error: str | None = None
    """Why a tool call or the reasoning block is malformed. Malformed calls are part of `text`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Result of a reply."""

    messages: Sequence[Message] = ()
    """Messages that follow the reply. Ignored if the episode ends."""
    reward: float | None = None
    """Reward of the reply. None makes no statement, which differs from 0: an episode without any reward fails. So does
    one in which a player took turns and has no reward."""
    done: bool = False
    """True if the task ended the episode."""
    truncated: bool = False
    """True if a limit ended the episode, not the task."""
    state: State | None = None
    """State in which the next turn begins. None: the digest of `messages`."""
    player: str = ""
    """Player of the next turn, the only one who gets `messages`. Empty: the player who replied."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of players other than the one who replied, for example of the loser. Added to their last turns."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of this turn. Each is averaged over the turns of an episode that have it, then over episodes. Of
    `success`, the last turn that has it counts."""


class Environment(ABC):
    """One episode. A method is a coroutine function, or a plain function, which may block.

    Plain functions need `isolation` `thread` or `process`. Calls follow one another; `close` may follow any call, also
    one that failed. The options of the config are keyword arguments of `__init__`, which loads nothing heavy.

    If the methods raise or exceed their deadline, the episode fails. A failure is never a reward of 0: the runtime
    retries the episode in a new instance, then excludes it from training.

    The same task, seed and replies must give the same episode. A resumed run repeats unfinished episodes with the
    replies that were already sampled. If the messages differ then, the episode starts again with new replies.
    """

    reports_success: ClassVar[bool] = False
    """True if a successful episode has the metric `success`. Episodes without it then count as 0, also if no episode of
    a batch has it."""

    @abstractmethod
    def reset(self, task: Task, seed: int) -> Opening | Awaitable[Opening]:
        """Begin the episode."""

    @abstractmethod
    def step(self, reply: Reply) -> Turn | Awaitable[Turn]:
        """Continue after a reply of the model. The text is a model's output: treat it as data, never evaluate it."""

    def score(self) -> Reward | Awaitable[Reward | None] | None:
        """Reward of the whole episode, added to those of its turns. None: the rewards of turns are all there is.

        Every player gets it. For other rewards of players see `Turn.rewards`.
        """
        return None

    def close(self) -> Awaitable[None] | None:
        """Release all resources. May be called more than once; not called if the process is killed."""
        return None


document_fields(__name__)
