"""Schemas of Acme's parts. Light."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll_core.spec.config import (
    InferWorkerConfig,
    PositiveInt,
    RewardConfig,
    RunConfig,
    StrategyConfig,
    TrainWorkerConfig,
)


class AcmeConfig(StrategyConfig):
    """`strategy_config` of both strategies."""

    vocabulary: PositiveInt = 32
    """Tokens of the table."""


class ShareConfig(RewardConfig):
    """`rewards.<domain>` with `reward: acme_share`."""

    reward: Literal["acme_share"]
    letter: str = Field(min_length=1, max_length=1)
    """The letter that is rewarded."""


class BanditConfig(RunConfig):
    """`pipeline: acme_bandit`."""

    pipeline: Literal["acme_bandit"]
    policy: TrainWorkerConfig
    """The model that learns."""
    sampler: InferWorkerConfig
    """The same model, sampled."""
    rewards: dict[str, ShareConfig]
    """Exactly one judge is used for every row."""
    max_steps: PositiveInt = 10
    """Steps."""
    shunned: str = ""
    """Letters that are to become unlikely."""
