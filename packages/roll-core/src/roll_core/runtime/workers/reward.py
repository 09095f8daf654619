"""Worker of a reward role: a reward function behind threads, so that a slow sample does not delay others.

score ─► thread ─┬─ the reward enforces `timeout_s` itself ────────► RewardFunction.score
                 └─ otherwise: ProcessReward ── RewardPool ─► child: RewardFunction.score; killed at `timeout_s`
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import PluginLoadError, RewardFailure, error_text
from roll_core.plugins.requirements import check_requirements
from roll_core.plugins.targets import load_class, load_target, schema_of
from roll_core.reward_pool import RewardPool
from roll_core.runtime.cluster.executors import wire
from roll_core.spec.config import RewardConfig
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.runtime.cluster.executors.base import Peers, Place
    from roll_core.spec.providers import RewardProvider
    from roll_core.spec.rollout import RewardRequest

THREADS = 8
CLOSE_S = 5.0
"""Seconds that `RewardFunction.close` may take in a child process."""
NO_REASON = "the reward gave no reason"
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
            self.function = ProcessReward(self.config, provider, owner)
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"{role}-{place.rank}")

    async def start(self) -> None:
        """Let the reward function load what it needs."""
        await asyncio.get_running_loop().run_in_executor(self.threads, self.function.start)

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Score samples. An exception becomes a failed reward with its cause, never a value."""
        loop = asyncio.get_running_loop()
        score = partial(scored, self.function, weight=self.config.weight, role=self.role, owner=self.owner)
        return list(await asyncio.gather(*(loop.run_in_executor(self.threads, score, request) for request in requests)))

    async def close(self) -> None:
        """Stop the threads and close the reward function."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.function.close()


def scored(function: RewardFunction, request: RewardRequest, weight: float, *, role: str, owner: str) -> Reward:
    """Score a sample and multiply its value by `weight`.

    An exception, a result that is no reward, or a value or component that is not finite becomes a failed reward with
    its cause.
    """
    try:
        reward = plain(function.score(request))
    except RewardFailure as failure:
        return Reward(value=None, failure=str(failure) or NO_REASON)
    except (Exception, SystemExit) as error:  # a reward is third-party code: its exception concerns only this sample
        reason = f"{type(error).__name__}: {error_text(error)}"
        log.warning("%s: sample %s: %s", role, request.sample.id, reason)
        return Reward(value=None, failure=f"{owner}: {reason}")
    if reward.failure or reward.value is None:  # also beside a value, which the failure makes doubtful
        return Reward(value=None, failure=reward.failure, detail=reward.detail)
    if not math.isfinite(reward.value):
        return Reward(value=None, failure=f"the reward is {reward.value}, expected a finite number")
    for name, component in reward.detail.items():
        if isinstance(component, float) and not math.isfinite(component):
            return Reward(value=None, failure=f"the component {name} is {component}, expected a finite number")
    return Reward(value=reward.value * weight, detail=reward.detail)


def plain(reward: object) -> Reward:
    """The reward that `score` returned, with Python's own numbers: others cannot be saved.

    Raises `TypeError` or `ValueError` for anything else.
    """
    if not isinstance(reward, Reward):
        raise TypeError(f"score returned {type(reward).__name__}, expected roll_core.types.Reward")
    return Reward(
        value=None if reward.value is None else float(reward.value),
        failure=reward.failure or ("" if reward.value is not None else NO_REASON),
        detail={
            name: component if isinstance(component, str) else float(component)
            for name, component in reward.detail.items()
        },
    )


class ProcessReward(RewardFunction):
    """Reward function in the worker that forwards requests to child processes."""

    def __init__(self, config: RewardConfig, provider: RewardProvider, owner: str) -> None:
        super().__init__(config)
        self._owner = owner
        self._pool = RewardPool(
            f"{__name__}:RewardJob",
            {
                "target": provider.target,
                "schema": provider.config or f"{RewardConfig.__module__}:{RewardConfig.__name__}",
                "owner": owner,
                "config": config.model_dump(mode="json"),
            },
            size=config.processes,
            start_timeout_s=config.start_timeout_s,
            owner=owner,
            close_s=CLOSE_S,
        )

    @override
    def start(self) -> None:
        """Load the reward in the first process. Raises `PluginLoadError` if that fails."""
        try:
            self._pool.start(wait=True)
        except RewardFailure as failure:
            self.close()
            raise PluginLoadError(f"{self._owner}: {failure}") from failure

    @override
    def score(self, request: RewardRequest) -> Reward:
        packed = base64.b64encode(wire.dumps(request)).decode("ascii")
        return Reward(**self._pool.call({"request": packed}, self.config.timeout_s))

    @override
    def close(self) -> None:
        self._pool.close()


class RewardJob:
    """Job handler in the child process: `RewardPool` calls it once per request."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        owner = options["owner"]
        schema = load_target(options["schema"], owner=owner)
        reward = load_class(options["target"], RewardFunction, owner=owner)  # type: ignore[type-abstract]
        self._reward = reward(schema.model_validate(options["config"]))
        self._reward.start()

    def __call__(self, request: str) -> dict[str, Any]:
        """Reward of a serialized `RewardRequest`, as plain values. Raises as `plain` does."""
        return asdict(plain(self._reward.score(wire.loads(base64.b64decode(request)))))

    def close(self) -> None:
        """Let the reward release its resources."""
        self._reward.close()
