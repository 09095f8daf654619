"""Rollouts as a run has them: accounted for in its ledger, watched by its guards, told in its metrics."""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import DataError
from roll_core.runtime.rollout.groups import ROLLOUT, group_of, request_for
from roll_core.runtime.rollout.recording import BatchTerms, RecordedBatch
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.spec.pipeline import Rollouts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.runtime.judging import Judges
    from roll_core.runtime.roles import GroupInferRole
    from roll_core.runtime.rollout.groups import BatchFacts
    from roll_core.runtime.rollout.recording import Recorder
    from roll_core.runtime.run import ActiveRun
    from roll_core.spec.pipeline import Prompt, RolloutPlan
    from roll_core.types import Completion, Group, SamplingParams


log = logging.getLogger(__name__)


async def roll_out(
    role: GroupInferRole,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    n: int,
    seed_of: tuple[int | str, ...] | None,
    judges: Judges | None,
    tokenizer: PreTrainedTokenizerBase,
    priority: int = ROLLOUT,
) -> list[Group]:
    """One group per prompt, in prompt order, nothing left out and nothing ahead: as an evaluation wants them.

    Answers are judged as they come; without judges the samples have no reward.
    """
    by_id = {prompt.id: prompt for prompt in prompts}
    judging: list[asyncio.Task[Group]] = []

    async def judge(completion: Completion) -> Group:
        prompt = by_id[completion.id]
        group = group_of(prompt, completion)
        return group if judges is None else await judges.judged(prompt, group, tokenizer)

    requests = [request_for(prompt, params, n=n, seed_of=seed_of, priority=priority) for prompt in prompts]
    try:
        await role.generate(requests, lambda completion: judging.append(asyncio.create_task(judge(completion))))
        groups = {group.id: group for group in await asyncio.gather(*judging)}
    finally:
        for task in judging:
            task.cancel()
        await asyncio.gather(*judging, return_exceptions=True)
    return [groups[prompt.id] for prompt in prompts]


def late_length_ratio(groups: Sequence[Group], ages: Sequence[int]) -> float:
    """Mean length of answers that were begun for an earlier batch ÷ mean length of the others: what a batch of those
    that are ready first leaves to the next one. 1 where there are not both."""
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for group, age in zip(groups, ages, strict=True):
        lengths[age > 0] += [len(sample.response_ids) for sample in group.samples]
    return (
        statistics.fmean(lengths[True]) / statistics.fmean(lengths[False]) if all(map(sum, lengths.values())) else 1.0
    )


def check_experts(groups: Sequence[Group], who: str) -> None:
    """Raise `DataError` unless samples say where their tokens were sent. Single ones may not, as where a replica
    died."""
    samples = [sample for group in groups for sample in group.samples if len(sample.response_ids)]
    if samples and all(sample.routed_experts is None for sample in samples):
        raise DataError(
            f"{who} returned no experts for router_replay.mode R3 to replay; recorded rollouts have them only if the"
            " run that recorded them replayed experts, too"
        )


class RunRollouts(Rollouts):
    """Batches of a run, wherever they come from: accounted for, watched by the guards, told in the metrics."""

    def __init__(self, run: ActiveRun, role: str, plan: RolloutPlan) -> None:
        self._run, self._role, self._plan = run, role, plan

    @abstractmethod
    async def _next(self, step: int) -> tuple[Sequence[Group], BatchFacts]:
        """The batch that is trained on once `step` steps are done."""

    @override
    async def batch(self) -> list[Group]:
        run = self._run
        with run.stage("rollout"):
            groups, facts = await self._next(run.step)
        run.check_tokens(self._role, groups, mixed=self._plan.ahead > 0)
        if self._plan.routed_experts:
            check_experts(groups, f"step {run.step + 1}: {self._role}")
        run.check_rewards(facts.verdicts)
        bound = math.ceil(self._plan.ahead)
        oldest = max(facts.ages, default=0)
        run.guard(
            "staleness",
            oldest <= bound or self._plan.stale == "reuse",
            f"step {run.step + 1}: a group was begun {oldest} steps ago, {bound} are allowed",
        )
        run.log(self._metrics(groups, facts))
        return list(groups)

    async def close(self) -> None:
        """End what is being generated."""

    def _metrics(self, groups: Sequence[Group], facts: BatchFacts) -> dict[str, float]:
        """Nothing where batches are simply what was asked."""
        found: dict[str, float] = {}
        if self._plan.keep is not None:
            found["rollout/left_out_groups"] = float(facts.left_out)
        if self._plan.first_ready:
            found |= {
                "rollout/passed_over_groups": float(facts.passed_over),
                "rollout/late_length_ratio": late_length_ratio(groups, facts.ages),
            }
        if self._plan.ahead:
            samples = [sample for group in groups for sample in group.samples if len(sample.versions)]
            found |= {
                "rollout/surplus_groups": float(facts.surplus),
                "rollout/stale_groups": float(facts.stale),
                "rollout/staleness/mean": statistics.fmean(facts.ages) if facts.ages else 0.0,
                "rollout/staleness/max": float(max(facts.ages, default=0)),
                "rollout/mixed_version_share": statistics.fmean(
                    bool(sample.versions.min() != sample.versions.max()) for sample in samples
                )
                if samples
                else 0.0,
            }
        return found


class DrawnRollouts(RunRollouts):
    """Drawn by a role of the run, and recorded where the plan says so."""

    def __init__(self, run: ActiveRun, role: GroupInferRole, plan: RolloutPlan, recorder: Recorder) -> None:
        super().__init__(run, role.name, plan)
        self._engine, self._recorder = role, recorder
        self._judges = judges = run.judges
        self._retries = 0
        """Of judgements, up to the last batch."""
        if plan.record:
            recorder.begin()

        async def judge(prompt: Prompt, group: Group) -> Group:
            return group if judges is None else await judges.judged(prompt, group, run.tokenizer)

        seeded = role.capabilities.free_seeds if plan.seeded is None else plan.seeded
        log.info("rollouts of %s are %sseeded", role.name, "" if seeded else "not ")
        seed = run.config.seed if seeded else None
        self._scheduler = RolloutScheduler(plan, role.dispatcher, judge, seed=seed, turn=role.turn, served=role.served)

    @override
    async def _next(self, step: int) -> tuple[Sequence[Group], BatchFacts]:
        groups, facts = await self._scheduler.batch(step)
        if self._plan.record:
            batch = RecordedBatch(groups=groups, facts=facts, weight_version=self._engine.weight_version)
            await asyncio.to_thread(self._recorder.write, step + 1, BatchTerms.of(self._plan), batch)
        return groups, facts

    @override
    def state(self) -> Mapping[str, Any]:
        return self._scheduler.state()

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        self._scheduler.load_state(state)

    @override
    async def close(self) -> None:
        await self._scheduler.close()

    @override
    def _metrics(self, groups: Sequence[Group], facts: BatchFacts) -> dict[str, float]:
        found = super()._metrics(groups, facts)
        if lost := self._engine.dispatcher.accounts.lost_replicas:
            found["rollout/lost_replicas"] = float(lost)
        if self._judges is not None and (retries := self._judges.retries - self._retries):
            self._retries += retries
            found["reward/retries"] = float(retries)
        return found
