"""Worker of a reward role: a reward function behind threads, so that a slow sample does not delay others.

score ─► thread ─┬─ the reward enforces `timeout_s` itself ──► RewardFunction.score
                 └─ otherwise: HostedReward ── a process ──► RewardFunction.score; killed at `timeout_s`
"""

from __future__ import annotations

import asyncio
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from roll_core.errors import RewardFailure
from roll_core.plugins.requirements import check_requirements
from roll_core.plugins.targets import load_target, schema_of
from roll_core.runtime.workers.hosted_reward import HostedReward
from roll_core.spec.config import RewardConfig
from roll_core.types import Reward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.runtime.cluster.executors.base import Peers, Place
    from roll_core.spec.providers import RewardProvider
    from roll_core.spec.rollout import RewardFunction, RewardRequest

THREADS = 8
log = logging.getLogger(__name__)


class RewardWorker:
    """Worker of a reward role. The executor constructs it in the worker's process."""

    def __init__(
        self, *, place: Place, peers: Peers, role: str, provider: RewardProvider, owner: str, config: Mapping[str, Any]
    ) -> None:
        """`owner` names the reward and its package in errors."""
        check_requirements(provider, owner=owner)
        schema = schema_of(provider, RewardConfig, owner=owner)
        self.role, self.owner = role, owner
        self.config = schema.model_validate(dict(config))
        self.function: RewardFunction
        if provider.enforces_timeout:
            self.function = load_target(provider.target, owner=owner)(self.config)
        else:
            self.function = HostedReward(self.config, provider, owner)
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"{role}-{place.rank}")

    async def start(self) -> None:
        """Let the reward function load what it needs."""
        await asyncio.get_running_loop().run_in_executor(self.threads, self.function.start)

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Score samples. An exception becomes a failed reward with its cause, never a value."""
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(loop.run_in_executor(self.threads, self._judge, each) for each in requests)))

    def _judge(self, request: RewardRequest) -> Reward:
        try:
            reward = self.function.score(request)
        except RewardFailure as failure:
            return Reward(value=None, failure=str(failure) or "no reason given")
        except Exception as error:  # a reward is third-party code: its exception concerns only this sample
            log.warning("%s: sample %s: %s: %s", self.role, request.sample.id, type(error).__name__, error)
            return Reward(value=None, failure=f"{self.owner}: {type(error).__name__}: {error}")
        if reward.value is None:
            return reward
        if not math.isfinite(reward.value):
            return Reward(value=None, failure=f"the reward is {reward.value}, which is not a number to learn from")
        return Reward(value=reward.value * self.config.weight, detail=reward.detail)

    async def close(self) -> None:
        """Stop the threads and close the reward function."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.function.close()
