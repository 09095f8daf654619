"""The contract of rollout programs: how the samples of one group come about.

    class TwoTurns(RolloutProgram):
        async def run(self, context, prompt):
            first = await context.generate(prompt.tokens, key="turn-0")
            ...

The scheduler runs one program for each prompt and knows nothing else of it. A `generate` call returns complete
responses: weight updates, restarted replicas and pauses between two batches happen below it, and the program never sees
them.
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
    """A row, ready to be answered."""

    id: str
    """Stable id of the row and the pass over the data, `<row>/<epoch>`."""
    row: str = ""
    """Id of the row alone, the same in every pass; empty where `id` is that."""
    tokens: TokenIds
    text: str
    tag: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns."""


class RolloutContext(ABC):
    """What the runtime gives to a running program. Coroutines, to be awaited: `generate`, `score`."""

    n: int
    """Samples that the group must have."""
    params: SamplingParams
    """Sampling parameters of the plan."""

    @abstractmethod
    async def generate(
        self, prompt_ids: TokenIds, *, n: int = 1, params: SamplingParams | None = None, key: str = ""
    ) -> Completion:
        """Sample `n` responses to a prompt, by default with the plan's `params`.

        `key` names the call within its group, `<trajectory>/<turn>` for instance: seeds derive from it, and a program
        that is restored and repeats a call gets the tokens back that were sampled for the same key.
        """

    @abstractmethod
    async def score(self, group: Group) -> Group:
        """The group with its samples' rewards, by the reward worker that its tag selects."""


class RolloutProgram(ABC):
    """Produces the samples of one group. Each group has a program of its own, used once."""

    @abstractmethod
    async def run(self, context: RolloutContext, prompt: Prompt) -> Group:
        """Generate and score the group of `prompt`. A cancelled program must release what it holds."""

    def snapshot(self) -> Mapping[str, Any] | None:
        """Plain values (JSON) from which `restore` continues; None if the program cannot be saved now. Sampled tokens
        are saved with them, by the keys of their `generate` calls. A program that cannot be saved starts again in the
        resumed run, which counts it in `rollout/restarted_groups`."""
        return None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `snapshot` returned. Called before `run`."""


document_fields(__name__)
