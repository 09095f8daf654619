"""`scores.jsonl`: what metrics read of each held-out response, one line per validation, or step of an evaluation.

samples ─► ScoredResponse ─► ScoresFile ─► last_responses: a resumed evaluation, paired differences, row filters
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from roll_core.runtime.records.run_files import OptionalLines, number, read_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from roll_core.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResponse:
    """What metrics read of a response. Plain values, for `scores.jsonl`."""

    prompt: str
    """Id of its prompt, and of its player."""
    tag: str
    score: float | None
    """None if the reward failed."""
    answer: str
    """The answer that the reward extracted; empty if there is none."""
    num_tokens: int
    """Sampled tokens."""
    cut: bool
    """True if the response ended at the maximum number of tokens."""
    task: str = ""
    """The task that the reward named; empty if there is none."""
    turns: int = 0
    """Turns of an episode; 0 for a single response."""
    read_tokens: int = 0
    """Tokens of the prompts of all turns."""

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """The metrics' part of a sample."""
        from roll_core.data.rollouts import num_read

        reward, rollout = sample.reward, sample.rollout
        detail = {} if reward is None else reward.detail
        return cls(
            prompt=f"{sample.group_id}/{sample.player}" if sample.player else sample.group_id,
            tag=sample.tag,
            score=None if reward is None else reward.value,
            answer=_text_of(detail, "answer"),
            num_tokens=int((sample.versions >= 0).sum()),
            cut=sample.finish_reason == "length",
            task=_text_of(detail, "task"),
            turns=0 if rollout is None else len(rollout.turns),
            read_tokens=0 if rollout is None else num_read(rollout),
        )

    def row(self) -> dict[str, Any]:
        """Its values for `scores.jsonl`, without those of episodes if it is none."""
        return {key: value for key, value in asdict(self).items() if value or key not in _OF_EPISODES}


_OF_EPISODES = ("task", "turns", "read_tokens")


def _text_of(detail: Mapping[str, float | str], key: str) -> str:
    """A text of a reward's detail, or of a part of a composite."""
    texts = (text for name, text in detail.items() if name.rpartition("/")[2] == key)
    return next((text for text in texts if isinstance(text, str)), "")


class ScoresFile(OptionalLines):
    """Writes the scores of held-out responses. A step is one line, so a truncated step is no step."""

    def write(self, step: int, samples: Sequence[Sample]) -> None:
        """Record all `samples`, and flush them to the disk before a checkpoint counts them."""
        responses = [ScoredResponse.of(sample).row() for sample in samples]
        self.append({"step": step, "responses": responses}, flush=True)


def last_responses(path: Path, num_responses: int) -> list[ScoredResponse]:
    """The newest `num_responses` of a file, in order. Empty if that is no whole number of lines, or one is damaged."""
    steps: list[list[dict[str, Any]]] = []
    remaining = num_responses
    try:
        for row in reversed(list(read_lines(path))):
            if remaining <= 0:
                break
            steps.append(row["responses"])
            remaining -= len(steps[-1])
        if remaining:
            return []
        return [
            ScoredResponse(**response | {"score": number(response["score"])})
            for responses in reversed(steps)
            for response in responses
        ]
    except (KeyError, TypeError):
        return []
