"""Scoring samples: the reward role of each tag, its workers in rotation, retries of failed rewards.

group ──► RewardRouter ─┬► RewardRole ──► a worker ──► value | failure ──► retry on the next worker, or exclude
          by tag        │  round robin
                        ├► ModelRewardRole ──► a role that scores        both in `model_rewards`
                        └► EngineRewardRole ──► a role that generates
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.config.secrets import Redactor
from roll_core.data.reasoning import decode_response
from roll_core.errors import DataError, WorkerDiedError
from roll_core.runtime.cluster.concurrency import cancel_all
from roll_core.runtime.cluster.executors.base import WorkerStub
from roll_core.runtime.workers.reward import THREADS, RewardWorker
from roll_core.spec.rollout import RewardRequest
from roll_core.types import Reward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    from transformers import PreTrainedTokenizerBase

    from roll_core.runtime.cluster.executors.base import WorkerGroup
    from roll_core.runtime.rollout.model_rewards import EngineRewardRole, ModelRewardRole
    from roll_core.spec.config import RewardConfig
    from roll_core.spec.rollout import Prompt
    from roll_core.types import Group, Sample

    AnyRewardRole: TypeAlias = "RewardRole | ModelRewardRole | EngineRewardRole"

log = logging.getLogger(__name__)

GROUPS_AT_ONCE = THREADS
"""Groups that a worker scores concurrently, enough to keep its threads busy. Others wait here, without a deadline."""
RETRY_S, LONGEST_RETRY_S = 0.5, 30.0
"""Delay before the first retry, which doubles with each further one, and its maximum."""


class RewardRouter:
    """The run's reward roles by domain. A sample's tag selects its role; a single role scores everything."""

    def __init__(self, roles: Mapping[str, AnyRewardRole], tags: Mapping[str, Sequence[str]]) -> None:
        """`roles` by domain; `tags[domain]` lists further tags that the domain's role scores."""
        self._roles = roles
        self._by_tag = dict(roles) | {tag: roles[domain] for domain, included in tags.items() for tag in included}

    @property
    def domains(self) -> frozenset[str]:
        """Domains that have a role."""
        return frozenset(self._roles)

    def role_of(self, tag: str) -> AnyRewardRole:
        """The role that scores a tag. Raises `DataError` for an unknown tag."""
        role = next(iter(self._roles.values())) if len(self._roles) == 1 else self._by_tag.get(tag)
        if role is None:
            raise DataError(
                f"no reward scores rows with tag {tag!r}, expected one of {', '.join(sorted(self._by_tag))}: see"
                " rewards.<domain>.tag_included"
            )
        return role

    @property
    def retries(self) -> int:
        """Scores that were retried so far."""
        return sum(role.retries for role in self._roles.values())

    async def close(self) -> None:
        """Stop replacing workers."""
        for role in self._roles.values():
            await role.close()

    async def score(self, prompt: Prompt, group: Group, tokenizer: PreTrainedTokenizerBase) -> Group:
        """Score a group, with its baseline if it has one, and return it with rewards. Raises `DataError` if its tag is
        unknown."""
        role = self.role_of(prompt.tag)
        samples = [*group.samples, *([] if group.baseline is None else [group.baseline])]
        rewards = await role.score([request_of(sample, prompt, tokenizer) for sample in samples])
        scored = [sample.with_reward(reward) for sample, reward in zip(samples, rewards, strict=True)]
        baseline = None if group.baseline is None else scored.pop()
        return replace(group, samples=tuple(scored), baseline=baseline)


class RewardRole:
    """A reward function on any number of workers, used in rotation."""

    def __init__(self, name: str, config: RewardConfig, group: WorkerGroup, redactor: Redactor | None = None) -> None:
        """`redactor` removes secrets from failures and details, which are shown with samples."""
        self.name, self.config, self.group = name, config, group
        self._workers = WorkerStub[RewardWorker](group)
        self._redactor = redactor or Redactor()
        self._turns = itertools.cycle(range(group.world_size))
        self._room = [asyncio.Semaphore(GROUPS_AT_ONCE) for _ in range(group.world_size)]
        self._replacing: dict[int, asyncio.Task[None]] = {}
        """Replacement tasks of exited workers, by rank. A failed task stays, so that its rank is not used again."""
        self.retries = 0
        """Scores that were retried so far."""

    async def start(self) -> None:
        """Load the reward function on every worker."""
        await self._workers(RewardWorker.start).all()

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Score the samples of a group together, on one worker.

        Retries failed samples on the next worker, with exponential backoff, since the failure may be temporary.
        """
        rewards = await self._scored(requests)
        for attempt in range(self.config.max_retries):
            failed = [index for index, reward in enumerate(rewards) if reward.failed]
            if not failed:
                break
            self.retries += len(failed)
            await asyncio.sleep(min(RETRY_S * 2**attempt, LONGEST_RETRY_S))
            for index, reward in zip(failed, await self._scored([requests[index] for index in failed]), strict=True):
                rewards[index] = reward
        return [self._redacted(reward) for reward in rewards]

    def _redacted(self, reward: Reward) -> Reward:
        clean = self._redactor.text
        detail = {
            name: clean(component) if isinstance(component, str) else component
            for name, component in reward.detail.items()
        }
        return replace(reward, failure=clean(reward.failure), detail=detail)

    async def close(self) -> None:
        """Stop replacing workers."""
        await cancel_all(self._replacing.values())

    async def _scored(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Score on the next worker. If its process exits meanwhile, the scores are failures."""
        while True:
            rank = await self._next()
            async with self._room[rank]:
                if rank in self._replacing:  # it exited while these samples waited: another worker scores them
                    continue
                try:
                    return await self._workers(RewardWorker.score).at(rank, requests)
                except WorkerDiedError as death:
                    if rank not in self.group.lost:  # this group cannot replace workers, so the run ends
                        raise
                    if rank not in self._replacing:
                        self._replacing[rank] = asyncio.ensure_future(self._replace(rank))
                    return [Reward(value=None, failure=str(death))] * len(requests)

    async def _next(self) -> int:
        """The next rank that is not being replaced."""
        while len(self._replacing) == self.group.world_size:
            pending = [task for task in self._replacing.values() if not task.done()]
            if not pending:
                await asyncio.gather(*self._replacing.values())
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        return next(rank for rank in self._turns if rank not in self._replacing)

    async def _replace(self, rank: int) -> None:
        try:
            await self.group.replace(rank)
            await self._workers(RewardWorker.start).at(rank)
        except Exception as failure:  # raised to callers once no rank is left
            log.warning("%s rank %d exited and could not be restarted: %s", self.name, rank, failure)
            raise
        del self._replacing[rank]


def request_of(sample: Sample, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> RewardRequest:
    """A sample with its response decoded, for scoring only."""
    response = decode_response(tokenizer, sample.response_ids.tolist())
    return RewardRequest(sample=sample, prompt=prompt.text, response=response, messages=prompt.messages)
