"""What there is to configure, which is little."""

from roll_core.spec.config import StrategyConfig


class NoConfig(StrategyConfig):
    """No keys."""


class EngineConfig(StrategyConfig):
    """Of engines."""

    cache_tokens: int | None = None
    """Tokens that there is room for at once."""
