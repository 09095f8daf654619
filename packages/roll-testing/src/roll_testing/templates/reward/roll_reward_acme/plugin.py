"""Registers the reward `acme`. Imports nothing heavy."""

from collections.abc import Iterator

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import RewardProvider

ROLL_HOOK_API = 1


@hookimpl
def roll_rewards() -> Iterator[RewardProvider]:
    """Reward `acme`."""
    yield RewardProvider(
        name="acme",
        target="roll_reward_acme.reward:AcmeReward",
        config="roll_reward_acme.config:AcmeRewardConfig",
        summary="1 if the last number of the response is the ground truth",
    )
