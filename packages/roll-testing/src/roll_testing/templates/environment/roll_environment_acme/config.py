"""Configuration of `acme`. Imports nothing heavy."""

from roll_core.spec.config import Config, PositiveInt


class AcmeEnvironmentConfig(Config):
    """`custom_envs.<tag>.env_config`, the keyword arguments of the environment."""

    largest: PositiveInt = 31
    """Largest number, from 0."""
    max_guesses: PositiveInt = 6
    """Guesses until the episode is truncated."""
