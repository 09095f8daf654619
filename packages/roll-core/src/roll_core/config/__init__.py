"""From YAML files and overrides to a validated config, with every mistake located; and back to YAML."""

from roll_core.config.dump import dump
from roll_core.config.loading import LoadedConfig, load, strategy_config
from roll_core.config.validate import schema_of

__all__ = ["LoadedConfig", "dump", "load", "schema_of", "strategy_config"]
