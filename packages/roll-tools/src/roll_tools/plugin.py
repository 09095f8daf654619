"""Hooks that provide commands and checks, and write the audit and the report of a run. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import CheckProvider, CommandProvider, KnownErrorsProvider

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from roll_core.spec.pipeline import Run

ROLL_HOOK_API = 1


@hookimpl
def roll_commands() -> Iterator[CommandProvider]:
    """Commands that examine what a run needs, read the files of runs, and play environments."""
    for name, summary in (
        ("init", "Write a first run: config, data and reward to edit"),
        ("plan", "Show the placement and memory of each role, and whether the run fits"),
        ("doctor", "Check this machine and its software, and suggest fixes"),
        ("audit", "Check rows, tokenizer and chat template, and show which tokens are trained"),
        ("eval", "Score models on held-out prompts, and compare them"),
        ("filter", "Measure the pass rate of the rows of a config, and write those in a window"),
        ("checkpoint", "List or verify checkpoints, or write one as a directory for transformers"),
        ("envs", "List environments, play an episode of one in the terminal, or test one"),
        ("runs", "List runs with state, step, score, config hash and age"),
        ("watch", "Follow a run in the terminal until it ends"),
        ("push", "Upload the model of a run to the Hugging Face Hub, with a model card"),
        ("report", "Write report.html of a run again, or a page that compares several runs"),
    ):
        function = {"eval": "evaluate", "filter": "filter_rows"}.get(name, name)
        yield CommandProvider(name=name, target=f"roll_tools.commands:{function}", summary=summary)


@hookimpl
def roll_checks() -> Iterator[CheckProvider]:
    """Checks that `roll-core doctor` runs on every machine."""
    for name, module, summary in (
        ("operating_system", "host", "Linux, and the version of its kernel"),
        ("shared_memory", "host", "Space in /dev/shm, for weight transfers between processes"),
        ("threads", "host", "Threads of a step on this host, and whether other programs use the cores"),
        ("open_files", "host", "Limit of open files and connections of a process"),
        ("disk", "host", "Free space in output_dir"),
        ("python", "software", "The interpreter's version"),
        ("libraries", "software", "Whether roll-core's own requirements are met, torch among them"),
        ("dtypes", "devices", "Dtypes that the devices support"),
        ("device_memory", "devices", "Memory of the devices, and its use by other programs"),
        ("output", "files", "Whether the config's output_dir can be written"),
        ("models", "files", "Whether the models of the config exist"),
        ("data", "files", "Whether the data files of the config exist"),
    ):
        yield CheckProvider(name=name, target=f"roll_tools.checks.{module}:{name}", summary=summary)


@hookimpl
def roll_known_errors() -> Iterator[KnownErrorsProvider]:
    """Errors of the libraries that every run needs, and of the machine."""
    yield KnownErrorsProvider(
        name="general",
        target="roll_tools.known_errors:KNOWN_ERRORS",
        summary="Errors of torch, its libraries and the machine",
        general=True,
    )


@hookimpl
def roll_run_started(run: Run) -> None:
    """Write `audit.json`, unless the pipeline has no tokenizer, and `prediction.json`."""
    from roll_core.runtime.run.active_run import ActiveRun

    if getattr(run, "tokenizer", None) is not None:
        from roll_tools.data_audit import write_audit

        with run.stage("data"):
            write_audit(run)
    if isinstance(run, ActiveRun):
        from roll_tools.planning import write_prediction

        with run.stage("build roles"):
            write_prediction(run)


@hookimpl
def roll_run_recorded(directory: Path) -> Path:
    """Write `report.html`."""
    from roll_tools.page import write_report

    return write_report(directory)
