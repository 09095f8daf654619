"""Loads a config: composes and validates it, or reports all its mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.config.compose import compose
from roll_core.config.validate import NAMED_PARTS, validate
from roll_core.errors import ConfigProblem
from roll_core.plugins.targets import schema_of
from roll_core.spec.config import StrategyConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from roll_core.config.validate import ExtraCheck
    from roll_core.plugins.registry import Registry
    from roll_core.spec.config import RunConfig
    from roll_core.spec.providers import InferProvider, PipelineProvider, TrainProvider


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A config that is valid as far as files and plugins show."""

    config: RunConfig
    """Instance of the pipeline's schema."""
    pipeline: PipelineProvider
    sources: tuple[Path, ...]
    """Files of which it was composed; the requested file is first."""
    warnings: tuple[ConfigProblem, ...] = ()
    """Valid but probably unintended values, see `RunConfig.warnings`."""


def load(
    path: str | PathLike[str],
    overrides: Sequence[str],
    registry: Registry,
    extra_check: ExtraCheck | None = None,
    *,
    needs: bool = False,
) -> LoadedConfig:
    """Load the config at `path` with `key=value` overrides. Has no side effects, and imports nothing heavy.

    Exception: it imports the modules of functions of the user (`pg_variant: my_losses:name`).

    `extra_check` finds mistakes that schemas cannot detect. With `needs`, requirements (`Provider.needs`) that this
    environment does not meet are mistakes as well. Roles with their own environment, and roles whose workers run on the
    hosts of a cluster, are exempt.

    Raises `ConfigError` with the position of every mistake, and `PluginError` if a plugin that is needed to validate
    the config cannot be loaded.
    """
    composed = compose(Path(path), overrides, registry)
    config, pipeline = validate(composed, registry, extra_check, needs=needs)
    names = {key: getattr(config, key, None) for key in NAMED_PARTS}
    parts = {key: registry.find(NAMED_PARTS[key], name) for key, name in names.items() if name is not None}
    warnings = tuple(
        ConfigProblem(str(composed.positions.key(tuple(key.split(".")))), key, reason, code="ROLL-C050")
        for key, reason in config.warnings(parts).items()
    )
    return LoadedConfig(config=config, pipeline=pipeline, sources=composed.files, warnings=warnings)


def strategy_config(provider: TrainProvider | InferProvider, keys: dict[str, object], *, owner: str) -> StrategyConfig:
    """Validate `strategy_args.strategy_config` of a loaded config with its strategy's schema."""
    return schema_of(provider, StrategyConfig, owner=owner).model_validate(keys)
