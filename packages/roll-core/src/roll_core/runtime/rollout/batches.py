"""Facts about rollout batches: their rewards, ages and metrics, and problems of their samples."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from roll_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.pipeline import RolloutPlan
    from roll_core.types import Group, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStats:
    """Numbers of scored samples, and of those that have no reward after the last retry."""

    scored: int = 0
    failed: int = 0
    first_failure: str = ""
    """Reason of the first failed reward."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> RewardStats:
        """Count the samples of `groups` that were sent to a reward worker."""
        samples = [sample for group in groups for sample in (*group.samples, group.baseline) if sample is not None]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        failures = [reward.failure for reward in rewards if reward.failed]
        return cls(scored=len(rewards), failed=len(failures), first_failure=failures[0] if failures else "")

    def __add__(self, other: RewardStats) -> RewardStats:
        return RewardStats(
            scored=self.scored + other.scored,
            failed=self.failed + other.failed,
            first_failure=self.first_failure or other.first_failure,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """Properties of a batch besides its groups."""

    ages: tuple[int, ...]
    """Steps from the start of each group to this batch."""
    left_out: int
    """Groups that the filter rejected since the last batch."""
    stale: int
    """Groups that were restarted since the last batch because they exceeded the staleness bound."""
    surplus: int
    """Groups that stay for the next batch, finished or not."""
    positions: tuple[int, ...]
    """Position of each group's prompt in the order of its tag."""
    rewards: RewardStats
    """Counts over all groups scored since the last batch, including rejected groups and groups for later batches."""
    passed_over: int = 0
    """Groups that stay in the queue although the batch contains later prompts."""
    restarted: int = 0
    """Groups whose program was restarted in this resumed run, because its state could not be saved."""


class BatchSource(Protocol):
    """Generates batches, or reads recorded ones."""

    async def batch(self, step: int) -> tuple[Sequence[Group], BatchFacts]:
        """The batch to train on after `step` completed steps."""

    def state(self) -> Mapping[str, Any]:
        """See `Rollouts.state`."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Rollouts.load_state`."""


def batch_metrics(plan: RolloutPlan, groups: Sequence[Group], facts: BatchFacts) -> dict[str, float]:
    """Metrics `rollout/...` of the features that the plan uses."""
    found: dict[str, float] = {}
    if plan.keep is not None:
        found["rollout/left_out_groups"] = float(facts.left_out)
    if plan.first_ready:
        found |= {
            "rollout/passed_over_groups": float(facts.passed_over),
            "rollout/late_length_ratio": late_length_ratio(groups, facts.ages),
        }
    if plan.ahead:
        samples = [sample for group in groups for sample in group.samples if len(sample.versions)]
        mixed = [bool(sample.versions.min() != sample.versions.max()) for sample in samples]
        found |= {
            "rollout/surplus_groups": float(facts.surplus),
            "rollout/stale_groups": float(facts.stale),
            "rollout/staleness/mean": statistics.fmean(facts.ages) if facts.ages else 0.0,
            "rollout/staleness/max": float(max(facts.ages, default=0)),
            "rollout/mixed_version_share": statistics.fmean(mixed) if mixed else 0.0,
        }
    if facts.restarted:
        found["rollout/restarted_groups"] = float(facts.restarted)
    return found


def late_length_ratio(groups: Sequence[Group], ages: Sequence[int]) -> float:
    """Mean length of responses that were started for an earlier batch ÷ mean length of the others.

    Measures the length bias of batches that take groups in completion order. 1 unless both kinds exist.
    """
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for group, age in zip(groups, ages, strict=True):
        lengths[age > 0] += [len(sample.response_ids) for sample in group.samples]
    return (
        statistics.fmean(lengths[True]) / statistics.fmean(lengths[False]) if all(map(sum, lengths.values())) else 1.0
    )


def check_experts(groups: Sequence[Group], who: str) -> None:
    """Raise `DataError` if no sample has routed experts. Some samples may lack them after a replica was lost."""
    samples = [sample for group in groups for sample in group.samples if len(sample.response_ids)]
    if samples and all(sample.routed_experts is None for sample in samples):
        raise DataError(
            f"{who} returned no routed experts, which router_replay.mode R3 needs. Recorded rollouts have them only if"
            " the recorded run had mode R3, too"
        )


def token_problem(sample: Sample, *, vocab_size: int, version: int, mixed: bool = False) -> str:
    """Describe what is wrong with a sample's response tokens; empty if they are valid.

    Checks that logprobs, loss mask and versions have one value per token, that ids are below `vocab_size`, and that
    logprobs are finite and not positive. Sampled tokens must be of weight version `version`. If `mixed`, versions may
    also increase along the response up to `version`.
    """
    ids = sample.response_ids
    for name in ("logprobs", "loss_mask", "versions"):
        if len(getattr(sample, name)) != len(ids):
            return f"{len(ids)} response tokens but {len(getattr(sample, name))} {name}"
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        return f"token ids from {ids.min()} to {ids.max()}, but the vocabulary size is {vocab_size}"
    if not np.isfinite(sample.logprobs).all() or (sample.logprobs > 1e-3).any():
        return "logprobs that are not finite or are positive"
    versions = sample.versions[sample.loss_mask]
    if mixed and len(versions) and versions.max() <= version and (np.diff(versions) >= 0).all():
        return ""
    if (versions != version).any():
        return f"tokens sampled at weight versions {sorted(set(versions.tolist()))}, expected {version}"
    return ""
