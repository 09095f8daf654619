"""The Python API, `import roll_core as roll`. The commands `run` and `check` call the same functions.

roll.run ─► prepare ─► load, FileCheck ─► execute ─► RunResult
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.api.files import FileCheck
from roll_core.config import LoadedConfig, load
from roll_core.config.positions import COMMAND_LINE
from roll_core.errors import ConfigError, PluginError
from roll_core.plugins.registry import check_callbacks, load_registry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roll_core.config.loading import ConfigSource
    from roll_core.config.overrides import Overrides
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.run.loop import RunResult


def run(
    config: ConfigSource,
    overrides: Overrides = (),
    *,
    callbacks: Sequence[object] = (),
    files: bool = True,
    disabled_plugins: Sequence[str] = (),
) -> RunResult:
    """Run a config to its end, and return the result. Blocks; prints the progress of each step.

    `config` is a path, a mapping with the same keys, or a `RunConfig`. `overrides` are `key=value` texts or a mapping
    from dotted keys to values. `callbacks` are objects with any of the methods `roll_run_started(run)`,
    `roll_step_finished(run, step, metrics)` and `roll_run_finished(run, error)`; they are called in this run only, and
    an exception of one ends the run. With `files`, the models, rows and reward functions that the config names are
    checked first. `disabled_plugins` names distributions that are not imported.

    If an event loop runs in this thread (a notebook), the run has its own loop on another thread, and this thread
    blocks. Ctrl-C cancels the run, completes its record and report, and raises `RunInterruptedError`, which is a
    `KeyboardInterrupt`. Start the config with `resume_from_checkpoint=true` to continue from the last checkpoint.

    Raises `ConfigError` with all mistakes before the run, and the run's own error if it fails, with the run directory
    as a note.
    """
    check_callbacks(callbacks)
    registry = load_registry(disabled_plugins)
    with overrides_located():
        (loaded,) = prepare([config], overrides, registry, files=files)
    where = str(config) if isinstance(config, (str, os.PathLike)) else "config"
    from roll_core.runtime.run.loop import execute  # takes seconds; `prepare` reports mistakes first

    result = execute(loaded, registry, callbacks=callbacks, argv=["roll.run", where, *_texts(overrides)])
    error = result.error
    if isinstance(error, SystemExit):
        error = PluginError(f"code of the run called sys.exit({error.code!r})")
        error.__cause__ = result.error
    if error is not None:
        error.add_note(f"run directory: {result.run_dir.path}")
        raise error
    return result


def check(
    config: ConfigSource, overrides: Overrides = (), *, files: bool = True, disabled_plugins: Sequence[str] = ()
) -> LoadedConfig:
    """Check a config and return it validated, with its warnings, without starting a run. Arguments as in `run`.

    Raises `ConfigError` with all mistakes.
    """
    further = FileCheck() if files else None
    with overrides_located():
        loaded = load(config, overrides, load_registry(disabled_plugins), further, needs=files)
    return loaded if further is None else replace(loaded, unchecked=(*loaded.unchecked, *further.take_unchecked()))


# -- shared with the command line --------------------------------------------------------------------------------------


def prepare(
    configs: Sequence[ConfigSource], overrides: Overrides, registry: Registry, *, files: bool
) -> list[LoadedConfig]:
    """Load configs of runs to be started in order, and check all of them before the first one starts."""
    from roll_core import openmp
    from roll_core.plugins.requirements import check_extra

    os.environ.update(openmp.environment(os.environ))  # OpenMP reads these when torch is loaded
    further = FileCheck() if files else None
    loaded: list[LoadedConfig] = []
    for config in configs:
        written = [Path(earlier.config.output_dir).expanduser() / earlier.config.exp_name for earlier in loaded]
        with override_of(config, configs):
            loaded.append(load(config, overrides, registry, further, needs=True, written=written))
    check_extra("train", what="a run")
    return loaded


# -- overrides ---------------------------------------------------------------------------------------------------------


@contextmanager
def overrides_located() -> Iterator[None]:
    """Locate problems of overrides at `overrides`, instead of the command line."""
    try:
        yield
    except ConfigError as error:
        located = [
            replace(problem, where=problem.where.replace(COMMAND_LINE, "overrides")) for problem in error.problems
        ]
        raise ConfigError(located) from error.__cause__


@contextmanager
def override_of(config: ConfigSource, configs: Sequence[ConfigSource]) -> Iterator[None]:
    """Name the config in problems of overrides that apply to several configs."""
    try:
        yield
    except ConfigError as error:
        located = [replace(problem, where=place_of(problem.where, config, configs)) for problem in error.problems]
        raise ConfigError(located) from error.__cause__


def place_of(where: str, config: ConfigSource, configs: Sequence[ConfigSource]) -> str:
    """A place in messages about one of several configs, which names the config if the place is an override."""
    if where != COMMAND_LINE or len(configs) == 1:
        return where
    name = config if isinstance(config, (str, Path)) else f"config {configs.index(config) + 1}"
    return f"{where} ({name})"


def _texts(overrides: Overrides) -> list[str]:
    """The overrides as words of a command line."""
    import json

    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    return list(overrides)
