"""Runs a plugin's reward in child processes of its worker, which are killed at `timeout_s`.

worker: HostedReward.score ── JudgePool ──► child: Hosted(request) ─► RewardFunction.score
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import PluginLoadError, RewardFailure
from roll_core.plugins.targets import load_class, load_target
from roll_core.runtime.cluster.executors import wire
from roll_core.runtime.workers.judge_pool import JudgePool
from roll_core.spec.config import RewardConfig
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.providers import RewardProvider
    from roll_core.spec.rollout import RewardRequest

CLOSE_S = 5.0
"""Seconds that `RewardFunction.close` may take in a child process."""


class HostedReward(RewardFunction):
    """Reward function in the worker that forwards requests to child processes."""

    def __init__(self, config: RewardConfig, provider: RewardProvider, owner: str) -> None:
        super().__init__(config)
        self._owner = owner
        self._pool = JudgePool(
            f"{__name__}:Hosted",
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
        found = self._pool.call({"request": packed}, self.config.timeout_s)
        return Reward(value=found["value"], failure=found["failure"], detail=found["detail"])

    @override
    def close(self) -> None:
        self._pool.close()


class Hosted:
    """Job handler in the child process: `JudgePool` calls it once per request."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        owner = options["owner"]
        schema = load_target(options["schema"], owner=owner)
        reward = load_class(options["target"], RewardFunction, owner=owner)  # type: ignore[type-abstract]
        self._reward = reward(schema.model_validate(options["config"]))
        self._reward.start()

    def __call__(self, request: str) -> dict[str, Any]:
        """Reward of a serialized `RewardRequest`, as plain values.

        Raises `TypeError` if `score` does not return a `Reward`.
        """
        found = self._reward.score(wire.loads(base64.b64decode(request)))
        if not isinstance(found, Reward):
            raise TypeError(f"score returned {type(found).__name__}, expected roll_core.types.Reward")
        return {
            "value": None if found.value is None else float(found.value),
            "failure": found.failure,
            "detail": {name: each if isinstance(each, str) else float(each) for name, each in found.detail.items()},
        }

    def close(self) -> None:
        """Let the reward release its resources."""
        self._reward.close()
