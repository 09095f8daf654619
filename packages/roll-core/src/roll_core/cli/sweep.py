"""`roll-core run CONFIG --multirun key=a,b`: one run for each combination of values, and a page that compares them.

overrides ─► sweep_points ─► load each ─► run each that is not finished ─► table, roll-core report
"""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.api import prepare
from roll_core.cli.run import run_loaded
from roll_core.config import load
from roll_core.config.overrides import swept_values
from roll_core.config.positions import COMMAND_LINE
from roll_core.errors import ConfigError, ConfigProblem
from roll_core.plugins.registry import load_registry
from roll_core.runtime.records.record import read_record
from roll_core.runtime.records.run_dir import AUTO, experiment_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roll_core.config import LoadedConfig
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.records.run_dir import RunDir


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One combination of the swept values."""

    overrides: tuple[str, ...]
    """All overrides of its run, in the order of the command line."""
    name: str
    """The swept values as part of the experiment's name, such as `learning_rate-1e-6`. Empty if `exp_name` is swept."""


def sweep_points(words: Sequence[str]) -> list[SweepPoint]:
    """The combinations of the values of all overrides with several values; the last key varies fastest.

    Raises `ConfigError` if a key with several values is given twice, or if there is none.
    """
    problems: list[ConfigProblem] = []
    swept: dict[str, list[str]] = {}
    fixed: list[str] = []
    for word in words:
        key, values = swept_values(word, problems)
        if key in swept or (values and key in {other.partition("=")[0].lstrip("+") for other in fixed}):
            message = "a key with several values is given twice"
            problems.append(ConfigProblem(COMMAND_LINE, key, message, "write all its values once", code="ROLL-C022"))
        elif values:
            swept[key] = [f"{word.partition('=')[0]}={value}" for value in values]
        else:
            fixed.append(word)
    if not swept and not problems:
        hint = "write key=a,b, or remove --multirun"
        message = "--multirun needs a key with several values"
        problems.append(ConfigProblem(COMMAND_LINE, "", message, hint, code="ROLL-C025"))
    if problems:
        raise ConfigError(problems)
    names = {key: key.rpartition(".")[2] for key in swept}
    if len(set(names.values())) < len(names):
        names = {key: key for key in swept}
    points: list[SweepPoint] = []
    taken: set[str] = set()
    for combination in itertools.product(*swept.values()):
        parts = [f"{names[key]}-{value.partition('=')[2]}" for key, value in zip(swept, combination, strict=True)]
        name = re.sub(r"[^\w.-]+", "_", "-".join(parts))[:120]
        unique, number = name, 1
        while unique in taken:
            number += 1
            unique = f"{name}-{number}"
        taken.add(unique)
        points.append(SweepPoint((*fixed, *combination), "" if "exp_name" in swept else unique))
    return points


def run_sweep(
    config: Path,
    words: Sequence[str],
    disabled_plugins: Sequence[str],
    report: Callable[[list[str]], int],
    *,
    files: bool = True,
) -> int:
    """Check all runs of a sweep, run them in order, and compare them by the command `report`.

    A failed run does not end the sweep. With `resume_from_checkpoint`, finished runs are skipped, and others resumed.
    Returns 0 if every run finished, otherwise the exit code of the first run that did not.
    """
    registry = load_registry(disabled_plugins)
    points = _prepare_points(config, sweep_points(words), registry, files=files)
    finished = {name: run for name, (_, point) in points.items() if (run := _finished_run(point)) is not None}
    rest = {name: point for name, point in points.items() if name not in finished}
    results = dict(
        zip(
            rest,
            run_loaded(
                [point for _, point in rest.values()],
                registry,
                argvs=[["roll-core", "run", str(config), *overrides] for overrides, _ in rest.values()],
                keep_going=True,
            ),
            strict=False,  # a stopped sweep
        )
    )
    for name in points:
        if name in finished:
            state = "finished before, skipped"
        elif name in results:
            metrics = results[name].metrics
            score = metrics.get("val/score/mean", metrics.get("score/mean"))
            state = results[name].outcome + ("" if score is None else f", score {score:.4g}")
        else:
            state = "not started"
        sys.stdout.write(f"{name}: {state}\n")
    begun = {
        **finished,
        **{name: result.run_dir for name, result in results.items() if result.run_dir.metrics.exists()},
    }
    runs = [str(begun[name].path) for name in points if name in begun]
    if len(runs) > 1:
        first = next(iter(points.values()))[1].config
        report([*runs, "--out", str(Path(first.output_dir).expanduser() / f"{config.stem}-sweep.html")])
    codes = [result.exit_code for result in results.values()]
    return next((code for code in codes if code), 0)


def _prepare_points(
    config: Path, points: Sequence[SweepPoint], registry: Registry, *, files: bool
) -> dict[str, tuple[tuple[str, ...], LoadedConfig]]:
    """Overrides and config of each run, by its experiment. Raises `ConfigError` with the mistakes of all runs."""
    prepared: dict[str, tuple[tuple[str, ...], LoadedConfig]] = {}
    problems: dict[str, ConfigProblem] = {}
    for point in points:
        overrides = point.overrides
        try:
            if point.name:
                name = load(config, overrides, registry).config.exp_name
                overrides = (*overrides, f"exp_name={name}-{point.name}")
            (loaded,) = prepare([config], overrides, registry, files=files)
            prepared[loaded.config.exp_name] = (overrides, loaded)
        except ConfigError as error:
            problems.update((str(problem), problem) for problem in error.problems)
    if problems:
        raise ConfigError(list(problems.values()))
    return prepared


def _finished_run(loaded: LoadedConfig) -> RunDir | None:
    """The newest run of the experiment if it did all steps, and the config resumes; otherwise None."""
    config = loaded.config
    if config.resume_from_checkpoint not in (True, AUTO):
        return None
    for run in reversed(experiment_runs(Path(config.output_dir).expanduser() / config.exp_name)):
        record = read_record(run.record)
        done = record.get("steps_done", 0)
        if record.get("outcome") == "finished" and (config.max_steps is None or done >= config.max_steps):
            return run
    return None
