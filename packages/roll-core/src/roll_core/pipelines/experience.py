"""Samples of one batch on their way from rewards to advantages.

S samples, one per rollout; B training rows of these rollouts; T tokens of all rows, concatenated (prompts included).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_core.algorithms.correction import importance_weights, inside, normalise_weights, off_policy_mask
from roll_core.data.pack import sample_of
from roll_core.data.rollouts import rows, sequences_of
from roll_core.runtime.records.mismatch import LogprobRow
from roll_core.spec.algorithms import AdvantageInput, RolloutTurns
from roll_core.types import Group, Reward

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from roll_core.algorithms.correction_options import ImportanceWeightConfig, TrainInferCorrectionConfig
    from roll_core.types import Completion, GenerateRequest, Sample, TrainSequence


@dataclass(frozen=True, kw_only=True)
class Experience:
    """Samples that have a reward, the training rows of their rollouts, and what a step computes for their tokens.

    Rows are in the order of `samples`. A rollout with several rows names them by `TrainSequence.rollout`; they are
    adjacent. Values of tokens are stored as one tensor for all rows; `sequences` splits them.
    """

    samples: tuple[Sample, ...]
    rows: tuple[TrainSequence, ...]
    """The rows as the rollouts gave them."""
    baselines: tuple[Sample, ...] | None = None
    """`Group.baseline` of each sample; None if a group has none."""
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """What the step has computed, `[T]` each, by the name in `TrainSequence`. Replaces the fields of `rows`."""
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights of further loss terms, float32 `[T]`, by name (`TrainSequence.streams`)."""
    entropies_T: Tensor | None = None
    """Entropies of the policy, `[T]`, if they select tokens."""

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        *,
        routed_experts: bool = False,
        min_group_size: int = 1,
        scored: bool = True,
    ) -> Experience:
        """Samples of `groups` that have a reward and at least one response token, with the rows of their rollouts.

        Failed samples are dropped, unless `scored` is false: samples then need no reward. So are groups with fewer than
        `min_group_size` remaining samples, or with a failed baseline. Each player of a group is a group of its own.
        With `routed_experts`, rows keep the experts that the engine chose.
        """
        samples: list[Sample] = []
        baselines: list[Sample | None] = []
        sequences: list[TrainSequence] = []
        compared = [(group, members) for group in groups for members in group.by_player()]
        for index, (group, members) in enumerate(compared):
            valid = [
                sample
                for sample in members
                if len(sample.response_ids) and (not scored or score_of(sample) is not None)
            ]
            comparable = group.baseline is None or score_of(group.baseline) is not None
            if len(valid) >= min_group_size and comparable:
                for sample in valid:
                    sequences += sequences_of(sample, group=index, rollout=len(samples))
                    samples.append(sample)
                    baselines.append(group.baseline)
        known = tuple(sample for sample in baselines if sample is not None)
        return cls(
            samples=tuple(samples),
            rows=tuple(sequences) if routed_experts else without_experts(sequences),
            baselines=known if len(known) == len(samples) else None,
        )

    @classmethod
    def of_completions(
        cls,
        requests: Sequence[GenerateRequest],
        completions: Sequence[Completion],
        score: Callable[[Sample], float],
    ) -> Experience:
        """Samples of completions, one group per request, with the rewards that `score` gives."""
        groups = []
        for request, completion in zip(requests, completions, strict=True):
            samples = [
                sample_of(output, id=f"{request.id}/{index}", group_id=request.id, prompt_ids=request.prompt_ids)
                for index, output in enumerate(completion.outputs)
            ]
            scored = tuple(sample.with_reward(Reward(value=score(sample))) for sample in samples)
            groups.append(Group(id=request.id, samples=scored))
        return cls.of(groups)

    def advantage_input(self, scores_S: Tensor | None = None, **options: Any) -> AdvantageInput:
        """Input of an advantage estimator, with `scores_S` instead of the rewards if given."""
        return AdvantageInput(
            scores_S=self.scores_S.float() if scores_S is None else scores_S,
            mask_T=self.mask_T,
            segments_T=self.segments_T,
            groups_S=self.groups_S,
            turns=self.turns,
            values_T=self.flat("values"),
            **options,
        )

    @cached_property
    def sequences(self) -> tuple[TrainSequence, ...]:
        """The rows with their parts of `fields` and `streams`."""
        fields: dict[str, list[Any]] = {name: self.split(value_T) for name, value_T in self.fields.items()}
        streams = {name: self.split(value_T) for name, value_T in self.streams.items()}
        return tuple(
            replace(
                row,
                streams={**row.streams, **{name: parts[index] for name, parts in streams.items()}},
                **{name: parts[index] for name, parts in fields.items()},
            )
            for index, row in enumerate(self.rows)
        )

    @property
    def sampled(self) -> tuple[TrainSequence, ...]:
        """The rows with all sampled tokens in the loss mask, to score them and to train the critic."""
        masks = self.split(self.mask_T)
        return tuple(
            replace(row, loss_mask=mask, sampled_mask=None) for row, mask in zip(self.sequences, masks, strict=True)
        )

    @cached_property
    def bounds(self) -> npt.NDArray[np.int64]:
        """Index in `[T]` of each row's first token, and T, int64 `[B + 1]`."""
        return np.cumsum([0, *(len(row) for row in self.rows)])

    def split(self, value_T: Tensor) -> list[npt.NDArray[Any]]:
        """Parts of a tensor `[T, …]` that belong to each row."""
        return np.split(value_T.numpy(), self.bounds[1:-1])

    @property
    def scores_S(self) -> Tensor:
        """Rewards before normalisation, float64 `[S]`."""
        return scores_of(self.samples)

    @property
    def reward_size(self) -> float:
        """Largest absolute reward of a sample, or sum of its turns' absolute rewards; at least 1."""
        sizes = [abs(score) for sample in self.samples if (score := score_of(sample)) is not None]
        turns = [sample.rollout.turns for sample in self.samples if sample.rollout is not None]
        return max([1.0, *sizes, *(sum(abs(turn.reward or 0.0) for turn in episode) for episode in turns)])

    @property
    def components_S(self) -> Mapping[str, Tensor]:
        """Numeric components of the rewards by name, float32 `[S]`. NaN for samples without the component."""
        components: dict[str, Tensor] = {}
        for index, sample in enumerate(self.samples):
            for name, value in components_of(sample).items():
                components.setdefault(name, torch.full((len(self.samples),), torch.nan))[index] = value
        return components

    @cached_property
    def groups_S(self) -> Tensor:
        """Index of each sample's group, int64 `[S]`."""
        by_rollout = dict(zip(self.rollouts_B.tolist(), (row.group for row in self.rows), strict=True))
        return torch.tensor(list(by_rollout.values()), dtype=torch.int64)

    @cached_property
    def rollouts_B(self) -> Tensor:
        """Index in `samples` of each row's rollout, int64 `[B]`."""
        named = [row.rollout for row in self.rows]
        begins = [name is None or index == 0 or name != named[index - 1] for index, name in enumerate(named)]
        return torch.tensor(begins, dtype=torch.int64).cumsum(0) - 1

    @cached_property
    def mask_T(self) -> Tensor:
        """True for sampled tokens, bool `[T]`: those of rewards, advantages, the KL in the reward and the critic."""
        in_loss = zip(self.rows, self.split(self.loss_mask_T), strict=True)
        masks = [loss_mask if row.sampled_mask is None else row.sampled_mask for row, loss_mask in in_loss]
        return torch.from_numpy(np.concatenate(masks))

    @property
    def loss_mask_T(self) -> Tensor:
        """True for tokens in the policy's loss, bool `[T]`: sampled tokens that no mask excludes."""
        return self.require("loss_mask")

    @cached_property
    def segments_T(self) -> Tensor:
        """Index in `samples` of each token's rollout, int64 `[T]`."""
        return torch.repeat_interleave(self.rollouts_B, torch.from_numpy(np.diff(self.bounds)))

    @property
    def turns(self) -> RolloutTurns | None:
        """Turns of the rollouts; None unless all samples are multi-turn. No sample may have been removed."""
        rollouts = [sample.rollout for sample in self.samples if sample.rollout is not None]
        if not rollouts or len(rollouts) < len(self.samples):
            return None
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        begins = np.cumsum([0, *(len(rollout.turns) for rollout in rollouts)])
        index_T = [row.turns + begin for rollout, begin in zip(rollouts, begins, strict=False) for row in rows(rollout)]
        states = {state: number for number, state in enumerate(dict.fromkeys(turn.state for turn in turns))}
        return RolloutTurns(
            index_T=torch.from_numpy(np.concatenate(index_T)),
            rollouts_U=torch.repeat_interleave(torch.tensor([len(rollout.turns) for rollout in rollouts])),
            rewards_U=torch.tensor([turn.reward or 0.0 for turn in turns], dtype=torch.float32),
            states_U=None if None in states else torch.tensor([states[turn.state] for turn in turns]),
        )

    @property
    def has_advantages(self) -> bool:
        """True if a token in the policy's loss has an advantage other than zero."""
        advantages_T = self.flat("advantages")
        return advantages_T is not None and bool((advantages_T[self.loss_mask_T] != 0).any())

    def flat(self, name: str) -> Tensor | None:
        """A field of all rows, `[T, …]`; None if a row lacks it."""
        if name in self.fields:
            return self.fields[name]
        if name not in self._stored:
            values = [getattr(row, name) for row in self.rows]
            missing = any(value is None for value in values)
            self._stored[name] = None if missing else torch.from_numpy(np.concatenate(values))
        return self._stored[name]

    def require(self, name: str) -> Tensor:
        """A field of all rows, `[T, …]`. Raises `AssertionError` if a row lacks it: an earlier stage sets it."""
        value_T = self.flat(name)
        if value_T is None:
            raise AssertionError(f"a stage reads {name}, which no earlier stage has set for all rows")
        return value_T

    @cached_property
    def _stored(self) -> dict[str, Tensor | None]:
        """Fields of `rows` that were read before."""
        return {}

    def without_behaviour(self) -> Experience:
        """Remove the engine's logprobs, for a trainer that computes logprobs at another temperature."""
        return replace(self, rows=tuple(replace(row, behaviour_logprobs=None) for row in self.rows))

    def with_rows(self, **values: Sequence[npt.NDArray[Any]] | None) -> Experience:
        """Set per-token fields, one array of length L per row. Fields given as None are unchanged."""
        joined = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in values.items() if parts is not None}
        return replace(self, fields={**self.fields, **joined})

    def with_flat(self, **values: Tensor | None) -> Experience:
        """Set per-token fields from tensors `[T]`. Fields given as None are unchanged."""
        present = {name: value_T for name, value_T in values.items() if value_T is not None}
        floats = {
            name: value_T.float() if value_T.is_floating_point() else value_T for name, value_T in present.items()
        }
        return replace(self, fields={**self.fields, **floats})

    def with_stream(self, name: str, weights_T: Tensor) -> Experience:
        """Set the weights of a further loss term, `[T]`."""
        return replace(self, streams={**self.streams, name: weights_T.float()})

    def keep(self, kept_S: Tensor) -> Experience:
        """Keep only the samples where `kept_S` is True, with all their rows."""
        return self.keep_rows(kept_S[self.rollouts_B])

    def keep_rows(self, kept_B: Tensor) -> Experience:
        """Keep only the rows where `kept_B` is True, and the samples that still have a row."""
        kept_T = torch.repeat_interleave(kept_B, torch.from_numpy(np.diff(self.bounds)))
        samples = dict.fromkeys(self.rollouts_B[kept_B].tolist())
        return Experience(
            samples=tuple(self.samples[index] for index in samples),
            rows=tuple(self.rows[index] for index in kept_B.nonzero()[:, 0].tolist()),
            baselines=None if self.baselines is None else tuple(self.baselines[index] for index in samples),
            fields={name: value_T[kept_T] for name, value_T in self.fields.items()},
            streams={name: weights_T[kept_T] for name, weights_T in self.streams.items()},
            entropies_T=None if self.entropies_T is None else self.entropies_T[kept_T],
        )

    def with_loss(self) -> Experience:
        """Keep only the rows with a token in the loss mask or in a stream of weights."""
        has_loss = [
            row.loss_mask.any() or any(weights.any() for weights in row.streams.values()) for row in self.sequences
        ]
        return self.keep_rows(torch.tensor(has_loss, dtype=torch.bool))

    def in_units(self) -> Experience:
        """Keep the rows of each rollout in one microbatch, for losses with a statistic of whole rollouts."""
        return replace(self, rows=tuple(replace(row, unit=row.rollout) for row in self.rows))

    def with_positives(self, threshold: float) -> Experience:
        """Set the stream `positive`: 1 on the tokens in the loss of samples whose reward is above `threshold`."""
        return self.with_stream("positive", self.loss_mask_T & (self.scores_S > threshold)[self.segments_T])


def score_of(sample: Sample) -> float | None:
    """The sample's reward; None if it has none or scoring failed."""
    return None if sample.reward is None else sample.reward.value


def scores_of(samples: Sequence[Sample]) -> Tensor:
    """Rewards of samples that have one, float64 `[S]`."""
    return torch.tensor([score_of(sample) for sample in samples], dtype=torch.float64)


def components_of(sample: Sample) -> dict[str, float]:
    """Numeric components of the sample's reward; none if scoring failed."""
    if sample.reward is None or sample.reward.failed:
        return {}
    return {name: value for name, value in sample.reward.detail.items() if not isinstance(value, str)}


def correct(experience: Experience, config: TrainInferCorrectionConfig) -> tuple[Experience, dict[str, float]]:
    """Apply `train_infer_correction`: weights multiply advantages, filters reduce the loss mask.

    Ratios of runs and rollouts are those of their tokens in the loss.
    Returns the corrected batch and metrics. Rows without any remaining token are dropped, unless they have a stream.
    """
    old_T, behaviour_T = experience.require("old_logprobs"), experience.require("behaviour_logprobs")
    advantages_T = experience.require("advantages")
    mask_T, segments_T = experience.loss_mask_T, experience.segments_T
    if not mask_T.any():  # all rows have only streams
        return experience, {}
    batch, clamp = (old_T, behaviour_T, mask_T, segments_T), config.is_log_ratio_clamp
    metrics: dict[str, float] = {}
    if config.off_policy_mask_threshold is not None:
        stale_T = off_policy_mask(advantages_T, *batch, config.off_policy_mask_threshold)
        advantages_T = torch.where(stale_T, 0.0, advantages_T)
        metrics["correction/off_policy_masked_share"] = float(stale_T[mask_T].float().mean())
    if config.is_weight.enabled:
        weight_options = config.is_weight
        weights_T = importance_weights(weight_options, *batch, log_ratio_clamp=clamp)
        if weight_options.outside == "mask":
            metrics["correction/zero_share"] = float((weights_T[mask_T] == 0).float().mean())
        else:
            metrics["correction/bounded_share"] = _share_on_bounds(weights_T[mask_T], weight_options)
        if weight_options.batch_normalize:
            weights_T = normalise_weights(weights_T, mask_T, segments_T, weight_options.weight_type)
        metrics["correction/weight/mean"] = float(weights_T[mask_T].mean())
        advantages_T = advantages_T * weights_T
    kept_T = mask_T
    for filter_options in config.filters:
        if filter_options.enabled:
            kept_T = kept_T & inside(filter_options, *batch, log_ratio_clamp=clamp)
    corrected = experience.with_flat(advantages=advantages_T)
    if any(filter_options.enabled for filter_options in config.filters):
        metrics["correction/kept_share"] = float(kept_T[mask_T].float().mean())
        corrected = corrected.with_flat(loss_mask=kept_T).with_loss()
    return corrected, metrics


def _share_on_bounds(weights_N: Tensor, config: ImportanceWeightConfig) -> float:
    """Share of the weights that truncation moved to a bound."""
    return float(((weights_N <= config.lower_bound) | (weights_N >= config.upper_bound)).float().mean())


def without_experts(sequences: Sequence[TrainSequence]) -> tuple[TrainSequence, ...]:
    """Sequences without `routed_experts`, for models that route by themselves."""
    return tuple(
        sequence if sequence.routed_experts is None else replace(sequence, routed_experts=None)
        for sequence in sequences
    )


def logprob_gaps(experience: Experience, version: int) -> tuple[float | None, float | None]:
    """Mean |old logprob - engine's logprob| over sampled tokens: of current tokens, and of all other tokens.

    Current tokens have the weight version `version`, and so have all earlier sampled tokens of their row. The trainer
    has the same weights. A mean is None if it has no tokens. A token after older tokens usually attends to keys that
    older weights computed. Its logprob differs from that of the current weights, although the engine is correct.
    """
    old_T, behaviour_T = experience.flat("old_logprobs"), experience.flat("behaviour_logprobs")
    if old_T is None or behaviour_T is None:
        return None, None
    gap_T = (old_T - behaviour_T).abs()
    of_one_version_T = torch.from_numpy(
        np.concatenate([row for sample in experience.samples for row in _of_one_version(sample, version)])
    )
    now_N = gap_T[experience.mask_T & of_one_version_T]
    before_N = gap_T[experience.mask_T & ~of_one_version_T]
    return (float(now_N.mean()) if len(now_N) else None), (float(before_N.mean()) if len(before_N) else None)


def _of_one_version(sample: Sample, version: int) -> list[npt.NDArray[np.bool_]]:
    """For each row of a sample, `[L]`: True up to the first token that weights of another version sampled."""
    return [np.logical_and.accumulate((row == version) | (row < 0)) for row in _versions(sample)]


def _versions(sample: Sample) -> list[npt.NDArray[np.int32]]:
    """For each row of a sample, `[L]`: version of each token; -1 for tokens that the policy did not sample."""
    if sample.rollout is not None:
        return [row.versions for row in rows(sample.rollout)]
    return [np.concatenate([np.full(len(sample.prompt_ids), -1, dtype=np.int32), sample.versions])]


def logprob_rows(experience: Experience) -> tuple[LogprobRow, ...]:
    """Rows with the logprobs of both sides; empty if one side has none."""
    old_T, behaviour_T = experience.flat("old_logprobs"), experience.flat("behaviour_logprobs")
    if old_T is None or behaviour_T is None:
        return ()
    columns = (
        experience.split(experience.mask_T),
        [row for sample in experience.samples for row in _versions(sample)],
        experience.split(behaviour_T),
        experience.split(old_T),
    )
    return tuple(
        LogprobRow(tokens=row.tokens, sampled=sampled, versions=versions, engine=engine, trainer=trainer)
        for row, sampled, versions, engine, trainer in zip(experience.rows, *columns, strict=True)
    )


def sample_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rollout metrics: scores, lengths, failed rewards, and the share of groups with different rewards.

    Groups' baselines count in the generated tokens and failed rewards, and have metrics of their own.
    """
    samples = [sample for group in groups for sample in group.samples]
    baselines = [group.baseline for group in groups if group.baseline is not None]
    lengths = [int((sample.versions >= 0).sum()) for sample in samples]  # without tokens that the model read
    baseline_lengths = [len(sample.response_ids) for sample in baselines]
    metrics = {
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/min": float(min(lengths)),
        "prompt_length/mean": statistics.fmean(len(sample.prompt_ids) for sample in samples),
        "response_length/cut_share": statistics.fmean(sample.finish_reason == "length" for sample in samples),
        "tokens/generated": float(sum(lengths) + sum(baseline_lengths)),
        "reward/failures": float(
            sum(sample.reward is not None and sample.reward.failed for sample in (*samples, *baselines))
        ),
    }
    if baseline_scores := [score for sample in baselines if (score := score_of(sample)) is not None]:
        metrics |= {
            "baseline/score/mean": statistics.fmean(baseline_scores),
            "baseline/response_length/mean": statistics.fmean(baseline_lengths),
        }
    by_tag: defaultdict[str, list[float]] = defaultdict(list)
    spread = []
    for group in groups:
        for members in group.by_player():
            scores = [score for sample in members if (score := score_of(sample)) is not None]
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


def component_metrics(samples: Sequence[Sample], domains: Mapping[str, str]) -> dict[str, float]:
    """Mean of each numeric component of the rewards: `reward/<domain>/<component>/mean`. `domains` maps tags."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        domain = domains.get(sample.tag, sample.tag) or "untagged"
        for name, value in components_of(sample).items():
            values[f"reward/{domain}/{name}/mean"].append(value)
    return {name: statistics.fmean(components) for name, components in values.items()}
