"""A plugin whose parts are wrong, each in the way that its config says."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from roll_core.builtin.hf.config import HFInferConfig
from roll_core.builtin.hf.engine import HFInferStrategy
from roll_core.spec.config import RewardConfig
from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import InferProvider, RewardProvider
from roll_core.spec.reward import RewardFunction
from roll_core.types import Reward

ROLL_HOOK_API = 1


class FaultyEngineConfig(HFInferConfig):
    """As the embedded engine's."""

    fault: Literal["few", "list", "nan"]


class FaultyEngine(HFInferStrategy):
    async def generate(self, request):
        found = await super().generate(request)
        if self.config.fault == "few":
            return replace(found, outputs=found.outputs[:-1])
        first = found.outputs[0]
        wrong = first.logprobs.tolist() if self.config.fault == "list" else np.full_like(first.logprobs, np.nan)
        return replace(found, outputs=(replace(first, logprobs=wrong), *found.outputs[1:]))


class FaultyRewardConfig(RewardConfig):
    """`reward: faulty_reward`."""

    reward: Literal["faulty_reward"]
    fault: Literal["hang"]
    mark: str
    """A file that exists once it has hung."""


class FaultyReward(RewardFunction):
    def score(self, request):
        with contextlib.suppress(FileExistsError):
            Path(self.config.mark).touch(exist_ok=False)
            time.sleep(600)
        return Reward(value=len(request.response) % 3)


@hookimpl
def roll_rewards() -> Iterator[RewardProvider]:
    yield RewardProvider(
        name="faulty_reward",
        target="roll_faulty:FaultyReward",
        config="roll_faulty:FaultyRewardConfig",
        summary="Hangs once",
    )


@hookimpl
def roll_infer_strategies() -> Iterator[InferProvider]:
    yield InferProvider(
        name="faulty_engine",
        target="roll_faulty:FaultyEngine",
        config="roll_faulty:FaultyEngineConfig",
        summary="Returns what is no completion",
        capabilities=FaultyEngine.capabilities,
    )
