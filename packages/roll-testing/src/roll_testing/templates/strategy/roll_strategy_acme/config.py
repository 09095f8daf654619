"""Configuration of `acme`. Imports nothing heavy."""

from roll_core.spec.config import PositiveInt, StrategyConfig


class AcmeStrategyConfig(StrategyConfig):
    """`strategy_args.strategy_config` of `acme`."""

    chunk_tokens: PositiveInt | None = None
    """Tokens whose logits are in memory at a time. Default: depends on the vocabulary and the device."""
