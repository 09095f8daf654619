"""A plugin whose reward hangs or cannot start. Its processes import neither torch nor transformers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from roll_core.spec.config import RewardConfig
from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import RewardProvider
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward

ROLL_HOOK_API = 1


class FaultyRewardConfig(RewardConfig):
    """`reward: faulty_reward`."""

    reward: Literal["faulty_reward"]
    fault: Literal["hang", "start"]
    mark: str
    """A file that exists once it has hung."""


class FaultyReward(RewardFunction):
    def start(self):
        if self.config.fault == "start":
            raise KeyError("boom")

    def score(self, request):
        with contextlib.suppress(FileExistsError):
            Path(self.config.mark).touch(exist_ok=False)
            time.sleep(600)
        return Reward(value=len(request.response) % 3)


@hookimpl
def roll_rewards() -> Iterator[RewardProvider]:
    yield RewardProvider(
        name="faulty_reward",
        target="roll_faulty_reward:FaultyReward",
        config="roll_faulty_reward:FaultyRewardConfig",
        summary="Hangs once",
    )
