"""`roll-core check`: reports every mistake of every config without starting a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from roll_core.cli.files import FileCheck
from roll_core.config import load
from roll_core.errors import ConfigError, PluginError
from roll_core.pipelines.config import num_workers
from roll_core.plugins.registry import load_registry

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from roll_core.config import LoadedConfig


def check_configs(
    configs: Sequence[Path], overrides: Sequence[str], disabled_plugins: Sequence[str], *, files: bool = True
) -> int:
    """Check each config with the same overrides; with `files` also the models, rows and reward code that it names.

    Mistakes and warnings go to stderr; stdout gets a line for each valid config and for each skipped check. Returns the
    exit code: 2 if there is a mistake, otherwise 0.
    """
    registry = load_registry(disabled_plugins)
    further = FileCheck() if files else None
    mistakes = 0
    for config in configs:
        try:
            loaded = load(config, overrides, registry, further, needs=files)
        except ConfigError as error:
            mistakes += len(error.problems)
            sys.stderr.write(f"{error}\n")
        except PluginError as error:
            mistakes += 1
            sys.stderr.write(f"{config}: {error.described()}\n")
        else:
            sys.stderr.writelines(f"{line}\n" for line in warnings_of(loaded))
            sys.stdout.write(f"{config}: ok: {summary(loaded)}\n")
        for reason in further.take_unchecked() if further is not None else ():
            sys.stdout.write(f"{config}: not checked: {reason}\n")
    if mistakes:
        sys.stderr.write(f"{mistakes} mistake{'' if mistakes == 1 else 's'}\n")
    return 2 if mistakes else 0


def warnings_of(loaded: LoadedConfig) -> list[str]:
    """Format each warning as one line."""
    return [f"{each.where}: warning: {each.code} {each.key}: {each.message}" for each in loaded.warnings]


def summary(loaded: LoadedConfig) -> str:
    """Summarise a config on one line: pipeline, and strategy and number of workers of each role."""
    roles = []
    for name, role in loaded.config.roles().items():
        strategy = role.strategy_args.strategy_name if role.strategy_args is not None else getattr(role, "reward", "-")
        roles.append(f"{name} {strategy} × {num_workers(role)}")
    return f"{loaded.config.pipeline}: {', '.join(roles) or 'no roles'}"
