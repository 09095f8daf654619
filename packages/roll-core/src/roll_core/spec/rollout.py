"""The interface of rollout programs, which produce the samples of one group.

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
    from collections.abc import Mapping

    from roll_core.types import Completion, Group, SamplingParams, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A row of the data, tokenised and ready to generate from."""

    id: str
    """Stable id of the row and the pass over the data, `<row>/<epoch>`."""
    row: str = ""
    """Id of the row, the same in every pass; empty if equal to `id`."""
    tokens: TokenIds
    text: str
    tag: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row."""


class RolloutContext(ABC):
    """Services of the runtime for a running program. Coroutines: `generate`, `score`."""

    n: int
    """Number of samples that the group must have."""
    params: SamplingParams
    """Sampling parameters of the plan."""

    @abstractmethod
    async def generate(
        self, prompt_ids: TokenIds, *, n: int = 1, params: SamplingParams | None = None, key: str = ""
    ) -> Completion:
        """Sample `n` responses to a prompt, by default with the plan's `params`.

        `key` identifies the call within its group, for example `<trajectory>/<turn>`. Seeds derive from it. If a
        restored program repeats a call with the same key, it gets the tokens that were already sampled for it.
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


document_fields(__name__)
