"""`roll-core run` executes one run per config; `roll-core check` reports every mistake without starting a run."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.api import override_of, place_of, prepare
from roll_core.api.files import FileCheck
from roll_core.config import load
from roll_core.errors import ConfigError, PluginError, RollError
from roll_core.pipelines.config import num_workers
from roll_core.plugins.registry import load_registry

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from roll_core.config import LoadedConfig
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.run.loop import RunResult


def run_configs(
    configs: Sequence[Path], overrides: Sequence[str], disabled_plugins: Sequence[str], *, files: bool = True
) -> int:
    """Check every config before the first one runs, then run them in order; the first failure ends the sequence.

    With `files`, the check includes the models, rows and reward code that configs name. Returns the exit code: 0 only
    if every run completed the requested steps.
    """
    registry = load_registry(disabled_plugins)
    results = run_loaded(prepare(configs, overrides, registry, files=files), registry)
    return results[-1].exit_code


def run_loaded(
    configs: Sequence[LoadedConfig],
    registry: Registry,
    *,
    argvs: Sequence[Sequence[str]] | None = None,
    keep_going: bool = False,
) -> list[RunResult]:
    """Run checked configs in order; the first failure ends the sequence. Returns the results of the runs that began.

    With `keep_going`, only a run that is stopped by a user or a scheduler ends it. `argvs` are the command lines of the
    runs, by default this process's. The traceback of an error without advice goes to stderr.
    """
    import traceback

    from roll_core.config.secrets import Redactor
    from roll_core.runtime.records.ledger import process_age_s
    from roll_core.runtime.run.loop import execute

    results: list[RunResult] = []
    for i, config in enumerate(configs):
        before_s = 0.0 if results else process_age_s()
        result = execute(config, registry, argv=sys.argv if argvs is None else argvs[i], before_s=before_s)
        results.append(result)
        if result.error is not None:
            if not result.advice and not isinstance(result.error, (RollError, KeyboardInterrupt, SystemExit)):
                redactor = Redactor.of(os.environ, config.config.model_dump(mode="json"))
                sys.stderr.write(redactor.text("".join(traceback.format_exception(result.error))))
            if not keep_going or result.outcome in ("interrupted", "preempted"):
                break
    return results


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
            with override_of(config, configs):
                loaded = load(config, overrides, registry, further, needs=files)
        except ConfigError as error:
            mistakes += len(error.problems)
            _write_mistakes(str(error))
        except PluginError as error:
            mistakes += 1
            _write_mistakes(f"{config}: {error.described()}")
        else:
            placed = [replace(warning, where=place_of(warning.where, config, configs)) for warning in loaded.warnings]
            sys.stderr.writelines(f"{line}\n" for line in warnings_of(replace(loaded, warnings=tuple(placed))))
            sys.stdout.write(f"{config}: ok: {summary(loaded)}\n")
            sys.stdout.writelines(f"{config}: not checked: {reason}\n" for reason in loaded.unchecked)
        for reason in further.take_unchecked() if further is not None else ():
            sys.stdout.write(f"{config}: not checked: {reason}\n")
    if mistakes:
        sys.stderr.write(f"{mistakes} mistake{'' if mistakes == 1 else 's'}\n")
    return 2 if mistakes else 0


def _write_mistakes(text: str) -> None:
    """Write mistakes to stderr with secrets redacted."""
    from roll_core.config.secrets import Redactor  # compiles many patterns, which a valid config does not need

    sys.stderr.write(f"{Redactor.of(os.environ).text(text)}\n")


def warnings_of(loaded: LoadedConfig) -> list[str]:
    """Format each warning as one line."""
    return [f"{warning.where}: warning: {warning.code} {warning.key}: {warning.message}" for warning in loaded.warnings]


def summary(loaded: LoadedConfig) -> str:
    """Summarise a config on one line: pipeline, strategy and number of workers of each role, and optimizer steps."""
    roles = []
    for name, role in loaded.config.roles().items():
        strategy = role.strategy_args.strategy_name if role.strategy_args is not None else getattr(role, "reward", "-")
        roles.append(f"{name} {strategy} × {num_workers(role)}")
    steps = loaded.config.optimizer_steps()
    first, *others = steps.items() if steps else [("", 0)]
    per_batch = f"{first[1]} optimizer step{'' if first[1] == 1 else 's'} per batch"
    per_batch += "".join(f", {name} {number}" for name, number in others if number != first[1])
    parts = [", ".join(roles) or "no roles", *([per_batch] if steps else [])]
    if loaded.config.max_steps is not None and "max_steps" not in loaded.config.model_fields_set:
        parts.append(f"max_steps {loaded.config.max_steps}, the default")
    return f"{loaded.config.pipeline}: {'; '.join(parts)}"
