"""Rollout batches for pipelines: checked by the run's guards, with metrics, and recorded if configured."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from roll_core.errors import DataError
from roll_core.spec.pipeline import Rollouts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.spec.pipeline import RolloutPlan, Run
    from roll_core.types import Group


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
        rewards = [sample.reward for group in groups for sample in group.samples if sample.reward is not None]
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


class RunRollouts(Rollouts):
    """The batches of a `BatchSource`, with the checks and metrics of a run."""

    def __init__(
        self,
        run: Run,
        role: str,
        plan: RolloutPlan,
        source: BatchSource,
        *,
        check: Callable[[Sequence[Group], RewardStats], None],
        metrics: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`check` runs the guards on tokens and rewards. `metrics` returns additional metrics of the step."""
        self._run, self._role, self._plan, self._source = run, role, plan, source
        self._check, self._further_metrics = check, metrics

    @override
    async def batch(self) -> list[Group]:
        run = self._run
        with run.stage("rollout"):
            groups, facts = await self._source.batch(run.step)
        self._check(groups, facts.rewards)
        if self._plan.routed_experts:
            check_experts(groups, f"step {run.step + 1}: {self._role}")
        bound = math.ceil(self._plan.ahead)
        oldest = max(facts.ages, default=0)
        run.guard(
            "staleness",
            oldest <= bound or self._plan.stale == "reuse",
            f"step {run.step + 1}: a group was started {oldest} steps ago, but at most {bound} are allowed",
        )
        run.log({**batch_metrics(self._plan, groups, facts), **self._further_metrics()})
        return list(groups)

    @override
    def state(self) -> Mapping[str, Any]:
        return self._source.state()

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        self._source.load_state(state)


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
