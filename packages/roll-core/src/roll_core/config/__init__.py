"""Loads YAML files and overrides into a validated config, with the position of every mistake."""

from roll_core.config.loading import LoadedConfig, load, strategy_config

__all__ = ["LoadedConfig", "load", "strategy_config"]
