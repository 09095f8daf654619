"""From YAML files and overrides to a validated config, with every mistake located; and back to YAML."""

from roll_core.config.dump import dump
from roll_core.config.loading import LoadedConfig, load, strategy_config

__all__ = ["LoadedConfig", "dump", "load", "strategy_config"]
