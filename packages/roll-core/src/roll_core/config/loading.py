"""Loads a config: composes and validates it, or reports all its mistakes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.config.advice import advice_warnings
from roll_core.config.compose import compose
from roll_core.config.validate import NAMED_PARTS, validate
from roll_core.errors import ConfigError, ConfigProblem
from roll_core.plugins.targets import schema_of
from roll_core.spec.config import Config, RunConfig, StrategyConfig
from roll_core.spec.model import model_keys, positions_of
from roll_core.spec.providers import InferProvider, TrainProvider

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roll_core.config.compose import ComposedConfig
    from roll_core.config.overrides import Overrides
    from roll_core.config.validate import ExtraCheck
    from roll_core.plugins.registry import Registry
    from roll_core.spec.providers import PipelineProvider

ConfigSource = str | PathLike[str] | Mapping[str, Any] | RunConfig
"""A config: the path of its file, its keys and values, or a validated config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A config that is valid as far as files and plugins show."""

    config: RunConfig
    """Instance of the pipeline's schema."""
    pipeline: PipelineProvider
    sources: tuple[Path, ...]
    """Files of which it was composed; the requested file is first. Empty if the config was given as values."""
    warnings: tuple[ConfigProblem, ...] = ()
    """Valid but probably unintended values, see `RunConfig.warnings`."""
    unchecked: tuple[str, ...] = ()
    """Checks that timed out or could not be made here, each with its reason."""


def load(
    source: ConfigSource,
    overrides: Overrides,
    registry: Registry,
    extra_check: ExtraCheck | None = None,
    *,
    needs: bool = False,
    written: Sequence[Path] = (),
) -> LoadedConfig:
    """Load a config with overrides. Has no side effects, and imports nothing heavy.

    Exception: it imports the modules of functions of the user (`pg_variant: my_losses:name`).

    `extra_check` finds mistakes that schemas cannot detect. With `needs`, requirements (`Provider.needs`) that this
    environment does not meet are mistakes as well. Roles with their own environment, and roles whose workers run on the
    hosts of a cluster, are exempt. `written` are experiments that runs before this one write to: their links `latest`
    are followed when this run begins, all others here.

    Raises `ConfigError` with the position of every mistake (`config` without a file), and `PluginError` if a plugin
    that is needed to validate the config cannot be loaded.
    """
    if isinstance(source, RunConfig):
        from roll_core.config.dump import plain_values

        source = plain_values(source)
    composed = compose(source if isinstance(source, Mapping) else Path(source), overrides, registry)
    _pin_latest(composed.data, [os.path.abspath(folder) for folder in written])
    config, pipeline, unchecked, model_warnings = validate(composed, registry, extra_check, needs=needs)
    if lacking := list(_lacking(config, composed, registry)):
        raise ConfigError(lacking)
    names = {key: getattr(config, key, None) for key in NAMED_PARTS}
    parts = {key: registry.find(NAMED_PARTS[key], name) for key, name in names.items() if name is not None}
    unintended = {
        **_beyond_positions(config),
        **model_warnings,
        **_unread_keys(config),
        **config.training_warnings(),
        **config.warnings(parts),
    }
    unusual = {key: reason for key, reason in advice_warnings(config).items() if key not in unintended}
    warnings = tuple(
        ConfigProblem(str(composed.positions.key(tuple(key.split(".")))), key, reason, code=code)
        for code, reasons in (("ROLL-C050", unintended), ("ROLL-C051", unusual))
        for key, reason in reasons.items()
    )
    return LoadedConfig(
        config=config, pipeline=pipeline, sources=composed.files, warnings=warnings, unchecked=unchecked
    )


def _pin_latest(values: Any, written: Sequence[str]) -> None:
    """Resolve paths through the link `latest` of an experiment, which points to another run as soon as this one
    begins."""
    for key, value in list(values.items() if isinstance(values, dict) else enumerate(values)):
        if isinstance(value, (dict, list)):
            _pin_latest(value, written)
        elif isinstance(value, str) and "latest" in Path(value).parts:
            path = Path(os.path.abspath(os.path.expanduser(value)))
            links = [folder for folder in (path, *path.parents) if folder.name == "latest" and folder.is_symlink()]
            if links and path.exists() and not any(path.is_relative_to(folder) for folder in written):
                values[key] = os.path.realpath(path)


def _unread_keys(config: Config, prefix: str = "") -> dict[str, str]:
    """Warnings about keys that nothing reads, by dotted key."""
    unread = {f"{prefix}{name}": message for name, message in config.unread_keys().items()}
    for name in type(config).model_fields:
        value = getattr(config, name)
        blocks = {f"{name}.{key}": block for key, block in value.items()} if isinstance(value, dict) else {name: value}
        for path, block in blocks.items():
            if isinstance(block, Config):
                unread |= _unread_keys(block, f"{prefix}{path}.")
    return unread


def _beyond_positions(config: RunConfig) -> dict[str, str]:
    """A warning if sequences may be longer than those that a role's model was trained with."""
    for name, role in config.roles().items():
        limit = positions_of(model_keys(role.model_args.model_dump(), config.pretrain))
        if limit is not None and limit < config.prompt_length + config.response_length:
            return {
                "prompt_length": (
                    f"prompt_length {config.prompt_length} + response_length {config.response_length} ="
                    f" {config.prompt_length + config.response_length} tokens are more than the {limit} positions of"
                    f" the model of {name} (max_position_embeddings): lower them, or scale its rotary embeddings"
                )
            }
    return {}


def _lacking(config: RunConfig, composed: ComposedConfig, registry: Registry) -> Iterator[ConfigProblem]:
    """A problem for each capability that the pipeline needs and a role's strategy does not declare."""
    for role, needed in config.capabilities().items():
        worker = config.roles()[role]
        if worker.strategy_args is None:
            continue
        kind: type[TrainProvider | InferProvider] = InferProvider if worker.kind == "generate" else TrainProvider
        name, key = worker.strategy_args.strategy_name, f"{role}.strategy_args.strategy_name"
        capabilities = registry.find(kind, name).capabilities
        for capability in needed:
            if not getattr(capabilities, capability):
                able = [other.name for other in registry.providers(kind) if getattr(other.capabilities, capability)]
                yield ConfigProblem(
                    where=str(composed.positions.key(tuple(key.split(".")))),
                    key=key,
                    message=f"{name} does not declare the capability {capability}, which this role needs",
                    hint=f"strategies that declare it: {', '.join(able) or 'none'}",
                    code="ROLL-C017",
                )


def strategy_config(provider: TrainProvider | InferProvider, keys: dict[str, object], *, owner: str) -> StrategyConfig:
    """Validate `strategy_args.strategy_config` of a loaded config with its strategy's schema."""
    return schema_of(provider, StrategyConfig, owner=owner).model_validate(keys)
