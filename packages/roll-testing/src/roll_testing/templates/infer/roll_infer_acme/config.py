"""Configuration of `acme`. Imports nothing heavy."""

from roll_core.spec.config import PositiveInt, StrategyConfig


class AcmeEngineConfig(StrategyConfig):
    """`strategy_args.strategy_config` of `acme`."""

    max_requests: PositiveInt = 8
    """Requests that are computed at the same time. Others wait."""
