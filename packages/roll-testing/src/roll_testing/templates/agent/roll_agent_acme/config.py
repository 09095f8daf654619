"""Configuration of `acme`. Imports nothing heavy."""

from roll_core.spec.config import Config, NonNegativeInt


class AcmeAgentConfig(Config):
    """`custom_envs.<tag>.agent_config`, the keyword arguments of the agent."""

    checks: NonNegativeInt = 1
    """Number of times that the policy is asked to check its answer."""
