"""The interfaces of rollout programs, which produce the samples of a group, and of reward functions.

    class TwoTurns(RolloutProgram):
        async def run(self, context, prompt):
            first = await context.generate(prompt.tokens, key="turn-0")
            ...

The scheduler runs one program per prompt and knows nothing else about it. A `generate` call returns complete responses.
Weight updates, replica restarts and pauses between batches are handled by the runtime and are invisible to the program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from PIL import Image

    from roll_core.spec.config import EngineRewardConfig, RewardConfig
    from roll_core.types import (
        Completion,
        CompletionOutput,
        FinishReason,
        Floats,
        Group,
        Media,
        MediaKind,
        Reward,
        Sample,
        SamplingParams,
        TokenIds,
    )


IMAGE = "\ufffc"
"""Place of an image or a video in the content of a chat message: Unicode's object replacement character."""
MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "video")
"""Kinds of `roll_core.types.Media`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A row of the data, tokenised and ready to generate from."""

    id: str
    """Stable id of the row and the pass over the data, `<row>/<epoch>`."""
    row: str = ""
    """Id of the row, the same in every pass; empty if equal to `id`."""
    tokens: TokenIds
    text: str
    media: tuple[Media, ...] = ()
    """Images and videos of `tokens`, in their order."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The chat messages of which the template made `text`, with the keys `role` and `content`. A message with images
    also has `media`, a tuple of them, and `IMAGE` at their places in the content."""
    tag: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row."""


class RolloutContext(ABC):
    """Services of the runtime for a running program. Coroutines: `generate`, `score`."""

    n: int
    """Number of samples that the group must have. The players of an episode count as one."""
    params: SamplingParams
    """Sampling parameters of the plan."""

    @abstractmethod
    async def generate(
        self,
        prompt_ids: TokenIds,
        *,
        n: int = 1,
        params: SamplingParams | None = None,
        media: tuple[Media, ...] = (),
        key: str = "",
        on_progress: Callable[[Sequence[CompletionOutput | None]], None] | None = None,
    ) -> Completion:
        """Sample `n` responses to a prompt with these images, by default with the plan's `params`.

        `key` identifies the call within its group, for example `<trajectory>/<turn>`. Seeds derive from it. If a
        restored program repeats a call with the same key, it gets the tokens that were already sampled for it.

        `on_progress` receives the outputs so far, a few times per second, if the engine reports progress. Tokens are
        only appended. An output is None before its first token.
        """

    @abstractmethod
    async def score(self, group: Group) -> Group:
        """Score the group with the reward worker selected by its tag; returns the group with the samples' rewards."""


class RolloutProgram(ABC):
    """Produces the samples of one group. Each group gets a new instance, which is used once."""

    @abstractmethod
    async def run(self, context: RolloutContext, prompt: Prompt) -> Group:
        """Generate and score the group of `prompt`. If the program is cancelled, it must release its resources."""

    def snapshot(self) -> Mapping[str, Any] | None:
        """State from which `restore` continues, as plain JSON values; None if the program cannot be saved now.

        The runtime saves sampled tokens separately, by the keys of their `generate` calls. A program that cannot be
        saved starts again in the resumed run, which counts it in the metric `rollout/restarted_groups`.
        """
        return None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `snapshot` returned. Called before `run`."""


class PromptSampler(ABC):
    """Chooses the rows of a domain's prompts. Each domain has its own instance.

        start ─► [load_state] ─► { choose, observe, state } *

    The arguments of the class are the options of the config. A resumed run continues with the same rows if `state` has
    everything on which the choices depend. All methods run on the driver and must not block.
    """

    @abstractmethod
    def start(self, rows: Sequence[Prompt], seed: int) -> None:
        """Begin. `rows` are the prompts of the domain, whose `metadata` has the other columns. Called once, first."""

    @abstractmethod
    def choose(self, position: int) -> int:
        """Index of the row of the next prompt. Called once for each position, 0, 1, …; a resumed run continues."""

    def observe(self, row: int, scores: Sequence[float]) -> None:
        """Receive the rewards of a group of responses to the row. Failed rewards are missing.

        Also called for groups that `query_filter_config` rejects. A synchronous run observes all groups of a batch in
        the order of their positions before it chooses the next row, an asynchronous one as they finish.
        """

    def state(self) -> Mapping[str, Any]:
        """State from which `load_state` continues, as plain JSON values."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""

    def metrics(self) -> Mapping[str, float]:
        """Metrics of a step, logged as `sampler/<name>`, with several domains as `sampler/<domain>/<name>`."""
        return {}


# -- rewards -----------------------------------------------------------------------------------------------------------


class Columns(dict[str, Any]):
    """Columns of a row. A dotted name finds a value in a column with a mapping: `reward_model.ground_truth`.

    A column whose own name has dots comes first. Iteration yields the columns, not what is in them.
    """

    def __missing__(self, name: str) -> Any:
        value: Any = self
        for step in name.split("."):
            if not isinstance(value, dict) or not dict.__contains__(value, step):
                raise KeyError(name)
            value = dict.__getitem__(value, step)
        return value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name, self) is not self

    def get(self, name: str, default: Any = None) -> Any:
        """Value of a column; `default` if there is none."""
        try:
            return self[name]
        except KeyError:
            return default


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """A sample to score, with its text decoded once. The text is only for scoring: it is never tokenised again."""

    sample: Sample
    prompt: str
    response: str
    """Without special tokens, except marks of reasoning. `roll_core.data.reasoning.answer_of` removes the reasoning."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Chat messages of the prompt; see `Prompt.messages`."""
    values: Floats | None = None
    """`[L]`, output of the reward's own model at each token of its input. Only if the reward's schema has `kind`
    `score`."""
    replies: Sequence[str] = ()
    """What the reward's own model generated, without special tokens. Only for an `EngineReward`."""
    reply_finish_reasons: Sequence[FinishReason] = ()
    """Why each of `replies` ended: `length` if it was cut at the maximum number of tokens."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Other columns of the row. A dotted name finds a value in a column with a mapping."""
        return Columns(self.sample.metadata)

    @property
    def images(self) -> list[Image.Image]:
        """Images of the sample, and the frames of its videos, decoded to RGB at each call."""
        return [image for media in self.sample.media for image in media.images()]


class RewardFunction(ABC):
    """Scores samples in child processes of its role's worker: one instance per process, one sample at a time.

    If scoring a sample takes longer than `timeout_s`, its process is killed. If the provider declares
    `enforces_timeout`, the worker itself has one instance, and several threads call `score` concurrently.

    If the reward's schema has `kind` `score`, the reward is a role with a model of task `reward`. The driver then has
    one instance and calls `score` with the model's outputs (`RewardRequest.values`).
    """

    def __init__(self, config: RewardConfig) -> None:
        """Keep the configuration; load nothing heavy."""
        self.config = config

    def start(self) -> None:
        """Load resources. Called once, in the process that calls `score`."""

    def unscorable(self, row: Mapping[str, Any]) -> str:
        """Why every sample of a row with these columns would fail; empty if none would.

        `roll-core audit` calls this for each row, without `start`, and names the rows. Default: what the schema's
        `check_row` finds.
        """
        return next(iter(self.config.check_row(row).values()), "")

    @abstractmethod
    def score(self, request: RewardRequest) -> Reward:
        """Score one sample. Raise `RewardFailure` if no value can be computed: a failure is never a reward of 0.

        The text is a model's output: treat it as data, never evaluate it.
        """

    def close(self) -> None:
        """Release all resources. May be called more than once; not called if the process is killed."""


class EngineReward(RewardFunction):
    """Scores a sample by the replies of a model to a message about it. Its schema is an `EngineRewardConfig`.

    The reward is a role with an infer strategy. The driver has one instance. `score` gets the replies in
    `RewardRequest.replies`, `EngineRewardConfig.num_replies` of them. A reply may be incomplete: see
    `RewardRequest.reply_finish_reasons`.
    """

    config: EngineRewardConfig

    @abstractmethod
    def messages(self, request: RewardRequest) -> Sequence[Mapping[str, str]]:
        """Chat messages to the model, which its own chat template renders. May raise `RewardFailure`."""


document_fields(__name__)
