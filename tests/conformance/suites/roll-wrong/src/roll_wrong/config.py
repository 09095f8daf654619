"""Nothing to configure."""

from roll_core.spec.config import StrategyConfig


class NoConfig(StrategyConfig):
    """No keys."""
