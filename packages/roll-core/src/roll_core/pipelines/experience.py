"""Samples of one batch on their way from rewards to advantages.

S samples; T tokens of all sequences, concatenated (prompts included). Arrays of the sequences are numpy; advantages are
computed on flat tensors.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from roll_core.algorithms.correction import Band, importance_weights, inside
from roll_core.data.sequences import sequence_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roll_core.pipelines.config import TrainInferCorrectionConfig
    from roll_core.types import Floats, Group, Sample, TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """Samples that have a reward, and their sequences in the same order."""

    samples: tuple[Sample, ...]
    sequences: tuple[TrainSequence, ...]

    @classmethod
    def of(cls, groups: Sequence[Group], *, routed_experts: bool = False) -> Experience:
        """Samples of `groups` that have a reward and at least one response token. Failed samples are dropped.

        With `routed_experts`, their sequences keep the experts that the engine chose.
        """
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
        """Rewards before normalisation, float64 `[S]`."""
        values = [sample.reward.value for sample in self.samples if sample.reward is not None]
        return torch.tensor(values, dtype=torch.float64)

    @property
    def groups_S(self) -> Tensor:
        """Index of each sample's group, int64 `[S]`."""
        return torch.tensor([sequence.group for sequence in self.sequences], dtype=torch.int64)

    @property
    def mask_T(self) -> Tensor:
        """True for sampled tokens, bool `[T]`."""
        return torch.from_numpy(np.concatenate([sequence.loss_mask for sequence in self.sequences]))

    @property
    def segments_T(self) -> Tensor:
        """Index of each token's sequence, int64 `[T]`."""
        lengths = torch.tensor([len(sequence) for sequence in self.sequences])
        return torch.repeat_interleave(torch.arange(len(self.sequences)), lengths)

    @property
    def has_advantages(self) -> bool:
        """True if a sampled token has an advantage other than zero."""
        advantages_T = self.flat("advantages")
        return advantages_T is not None and bool((advantages_T[self.mask_T] != 0).any())

    def flat(self, name: str) -> Tensor | None:
        """Concatenated per-token field of all sequences, `[T]`; None if a sequence lacks it."""
        rows = [getattr(sequence, name) for sequence in self.sequences]
        return None if any(row is None for row in rows) else torch.from_numpy(np.concatenate(rows))

    def with_rows(self, **fields: Sequence[Floats] | None) -> Experience:
        """Set per-token fields, one array of length L per sequence. Fields given as None are unchanged."""
        given = {name: rows for name, rows in fields.items() if rows is not None}
        sequences = tuple(
            replace(sequence, **{name: rows[i] for name, rows in given.items()})  # type: ignore[arg-type]
            for i, sequence in enumerate(self.sequences)
        )
        return replace(self, sequences=sequences)

    def with_flat(self, **fields: Tensor | None) -> Experience:
        """Set per-token fields from flat tensors `[T]`. Fields given as None are unchanged."""
        return self.with_rows(
            **{name: None if flat_T is None else self.rows_of(flat_T.float()) for name, flat_T in fields.items()}
        )

    def rows_of(self, flat_T: Tensor) -> list[Floats]:
        """Split a flat tensor `[T]` into one array of length L per sequence."""
        return np.split(flat_T.numpy(), np.cumsum([len(sequence) for sequence in self.sequences])[:-1])

    def keep(self, kept_S: Tensor) -> Experience:
        """Keep only the samples where `kept_S` is True."""
        chosen = [i for i, kept in enumerate(kept_S.tolist()) if kept]
        return Experience(
            samples=tuple(self.samples[i] for i in chosen), sequences=tuple(self.sequences[i] for i in chosen)
        )


def correct(experience: Experience, config: TrainInferCorrectionConfig) -> tuple[Experience, dict[str, float]]:
    """Apply `train_infer_correction`: weights multiply advantages, filters reduce the loss mask.

    Returns the corrected batch and metrics. Samples without any remaining token are dropped.
    """
    old_T, behaviour_T = experience.flat("old_logprobs"), experience.flat("behaviour_logprobs")
    advantages_T = experience.flat("advantages")
    if old_T is None or behaviour_T is None or advantages_T is None:
        raise AssertionError("a correction needs logprobs of the trainer and of the engine, and advantages")
    mask_T, segments_T = experience.mask_T, experience.segments_T
    metrics: dict[str, float] = {}
    if config.is_weight.enabled:
        bound = config.is_weight.upper_bound
        weights_T = importance_weights(
            old_T, behaviour_T, mask_T, segments_T, level=config.is_weight.weight_type, upper_bound=bound
        )
        advantages_T = advantages_T * weights_T
        metrics["correction/weight/mean"] = float(weights_T[mask_T].mean())
        metrics["correction/bounded_share"] = float((weights_T[mask_T] >= bound).float().mean())
    kept_T = mask_T
    for each in config.filters:
        if each.enabled:
            band = Band(
                level=each.agg_type,
                ratio=(each.ratio_low, each.ratio_high) if each.ratio_enabled else None,
                difference=(each.diff_low, each.diff_high) if each.diff_enabled else None,
            )
            kept_T = kept_T & inside(band, old_T, behaviour_T, mask_T, segments_T)
    corrected = experience.with_flat(advantages=advantages_T)
    if any(each.enabled for each in config.filters):
        metrics["correction/kept_share"] = float(kept_T[mask_T].float().mean())
        masks = corrected.rows_of(kept_T)
        corrected = corrected.with_rows(loss_mask=masks).keep(torch.tensor([bool(mask.any()) for mask in masks]))
    return corrected, metrics


def without_experts(sequences: Sequence[TrainSequence]) -> tuple[TrainSequence, ...]:
    """Sequences without `routed_experts`, for models that route by themselves."""
    return tuple(each if each.routed_experts is None else replace(each, routed_experts=None) for each in sequences)


def logprob_gaps(experience: Experience, version: int) -> tuple[float | None, float | None]:
    """Mean |old logprob - engine's logprob| over sampled tokens: of current tokens, and of all other tokens.

    Current tokens have the weight version `version`, and so have all earlier tokens of their response. The trainer has
    the same weights. A mean is None if it has no tokens. A token after older tokens usually attends to keys that older
    weights computed. Its logprob differs from that of the current weights, although the engine is correct.
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
    """Rollout metrics: scores, lengths, failed rewards, and the share of groups with different rewards."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.response_ids) for sample in samples]
    metrics = {
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/min": float(min(lengths)),
        "prompt_length/mean": statistics.fmean(len(sample.prompt_ids) for sample in samples),
        "response_length/cut_share": statistics.fmean(sample.finish_reason == "length" for sample in samples),
        "tokens/generated": float(sum(lengths)),
        "reward/failures": float(sum(sample.reward is not None and sample.reward.failed for sample in samples)),
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
