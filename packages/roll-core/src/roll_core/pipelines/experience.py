"""The samples of one batch on their way from rewards to advantages.

S samples, T their tokens laid end to end (prompts included). Arrays of the sequences are numpy; credit is computed on
flat tensors.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from roll_core.data.sequences import sequence_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roll_core.types import Floats, Group, Sample, TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """Samples that have a reward, and their sequences in the same order."""

    samples: tuple[Sample, ...]
    sequences: tuple[TrainSequence, ...]

    @classmethod
    def of(cls, groups: Sequence[Group], *, routed_experts: bool = False) -> Experience:
        """The samples of `groups` that have a reward and at least one token; failures take no part in anything.
        `routed_experts`: their sequences have those that the engine chose."""
        samples: list[Sample] = []
        sequences: list[TrainSequence] = []
        for index, group in enumerate(groups):
            for sample in group.samples:
                if sample.reward is not None and sample.reward.value is not None and len(sample.response_ids):
                    samples.append(sample)
                    sequences.append(sequence_of(sample, group=index))
        chosen = tuple(sequences) if routed_experts else without_experts(sequences)
        return cls(samples=tuple(samples), sequences=chosen)

    @property
    def scores_S(self) -> Tensor:
        """Rewards as the judges gave them, float64."""
        values = [sample.reward.value for sample in self.samples if sample.reward is not None]
        return torch.tensor(values, dtype=torch.float64)

    @property
    def groups_S(self) -> Tensor:
        """Index of each sample's group."""
        return torch.tensor([sequence.group for sequence in self.sequences], dtype=torch.int64)

    @property
    def mask_T(self) -> Tensor:
        """Tokens that the model drew."""
        return torch.from_numpy(np.concatenate([sequence.loss_mask for sequence in self.sequences]))

    @property
    def segments_T(self) -> Tensor:
        """Index of each token's sequence."""
        lengths = torch.tensor([len(sequence) for sequence in self.sequences])
        return torch.repeat_interleave(torch.arange(len(self.sequences)), lengths)

    @property
    def has_advantages(self) -> bool:
        """True if a sampled token has an advantage other than zero."""
        advantages_T = self.flat("advantages")
        return advantages_T is not None and bool((advantages_T[self.mask_T] != 0).any())

    def flat(self, name: str) -> Tensor | None:
        """A per-token field of all sequences end to end; None where they do not have it."""
        rows = [getattr(sequence, name) for sequence in self.sequences]
        return None if any(row is None for row in rows) else torch.from_numpy(np.concatenate(rows))

    def with_rows(self, **fields: Sequence[Floats] | None) -> Experience:
        """Set per-token fields, one array of length L per sequence; fields given as None stay as they are."""
        given = {name: rows for name, rows in fields.items() if rows is not None}
        sequences = tuple(
            replace(sequence, **{name: rows[i] for name, rows in given.items()})  # type: ignore[arg-type]
            for i, sequence in enumerate(self.sequences)
        )
        return replace(self, sequences=sequences)

    def with_flat(self, **fields: Tensor | None) -> Experience:
        """Set per-token fields from flat tensors."""
        bounds = np.cumsum([len(sequence) for sequence in self.sequences])[:-1]
        rows = {
            name: None if flat_T is None else np.split(flat_T.float().numpy(), bounds)
            for name, flat_T in fields.items()
        }
        return self.with_rows(**rows)

    def keep(self, kept_S: Tensor) -> Experience:
        """Only the samples where `kept_S` is true."""
        chosen = [i for i, kept in enumerate(kept_S.tolist()) if kept]
        return Experience(
            samples=tuple(self.samples[i] for i in chosen), sequences=tuple(self.sequences[i] for i in chosen)
        )


def without_experts(sequences: Sequence[TrainSequence]) -> tuple[TrainSequence, ...]:
    """For models that choose their experts themselves."""
    return tuple(each if each.routed_experts is None else replace(each, routed_experts=None) for each in sequences)


def logprob_gaps(experience: Experience, version: int) -> tuple[float | None, float | None]:
    """Means over drawn tokens of |old logprob - engine's logprob|: of those that the weights of `version`, which the
    trainer has, drew from their answer's beginning on, and of all others. None where there are none.

    A token that follows those of older weights attends to keys that these computed, as a rule: its logprob under the
    weights alone is another, though the engine does nothing wrong.
    """
    old_T, behaviour_T = experience.flat("old_logprobs"), experience.flat("behaviour_logprobs")
    if old_T is None or behaviour_T is None:
        return None, None
    gap_T = (old_T - behaviour_T).abs()
    of_one_version_T = torch.from_numpy(
        np.concatenate(
            [
                np.concatenate(
                    [np.zeros(len(s.prompt_ids), dtype=np.bool_), np.logical_and.accumulate(s.versions == version)]
                )
                for s in experience.samples
            ]
        )
    )
    now_N = gap_T[experience.mask_T & of_one_version_T]
    before_N = gap_T[experience.mask_T & ~of_one_version_T]
    return (float(now_N.mean()) if len(now_N) else None), (float(before_N.mean()) if len(before_N) else None)


def sample_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What the rollouts were like: scores, lengths, and how many groups were solved, failed or mixed."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.response_ids) for sample in samples]
    metrics = {
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/min": float(min(lengths)),
        "prompt_length/mean": statistics.fmean(len(sample.prompt_ids) for sample in samples),
        "response_length/cut_share": statistics.fmean(sample.finish_reason == "length" for sample in samples),
        "tokens/generated": float(sum(lengths)),
        "reward/failures": float(sum(sample.reward is None or sample.reward.failed for sample in samples)),
    }
    by_tag: defaultdict[str, list[float]] = defaultdict(list)
    spread = []
    for group in groups:
        scores = [s.reward.value for s in group.samples if s.reward is not None and s.reward.value is not None]
        by_tag[group.samples[0].tag] += scores
        if scores:
            spread.append(max(scores) - min(scores))
    scores = [score for tag in by_tag.values() for score in tag]
    if scores:
        metrics |= {
            "score/mean": statistics.fmean(scores),
            "score/max": max(scores),
            "score/min": min(scores),
            "score/std": statistics.pstdev(scores),
            "groups/mixed_share": statistics.fmean(gap > 0 for gap in spread),
        }
    if len(by_tag) > 1:
        metrics |= {f"score/{tag or 'untagged'}/mean": statistics.fmean(s) for tag, s in by_tag.items() if s}
    return metrics
