"""Loads YAML files and overrides into a validated config, with the position of every mistake; writes configs as
YAML."""

from roll_core.config.dump import dump
from roll_core.config.loading import LoadedConfig, load, strategy_config

__all__ = ["LoadedConfig", "dump", "load", "strategy_config"]
