"""Arguments of the commands. The function that a command calls is imported after its arguments are parsed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.plugins.registry import Registry


def envs(words: Sequence[str], registry: Registry) -> int:
    """List the environments of installed packages, or play an episode of one."""
    parser = _parser("envs", "List the environments of installed packages, or play an episode of one.")
    actions = parser.add_subparsers(dest="action", metavar="list | play", required=True)
    actions.add_parser("list", help="list environments with the keys of env_config", allow_abbrev=False)
    playing = actions.add_parser("play", help="play an episode; each line is a reply", allow_abbrev=False)
    playing.add_argument("name", metavar="NAME", help="environment, or your own class as module:Class")
    playing.add_argument("settings", metavar="KEY=VALUE", nargs="*", help="keys of env_config")
    playing.add_argument("--seed", type=int, default=0, help="seed of the episode (default: 0)")
    options = parser.parse_args(words)
    from roll_tools.environments import list_environments, play_environment

    if options.action == "list":
        return list_environments(registry)
    return play_environment(options.name, options.settings, registry, seed=options.seed)


def runs(words: Sequence[str], registry: Registry) -> int:
    """List the runs of an output directory, an experiment or a single run directory."""
    parser = _parser("runs", "List the runs of an output directory, an experiment or a single run directory.")
    parser.add_argument("dir", metavar="DIR", type=Path, nargs="?", default=Path("output"), help="default: output")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    from roll_tools.runs import list_runs

    return list_runs(options.dir, as_json=options.json)


def watch(words: Sequence[str], registry: Registry) -> int:
    """Follow a run until it ends."""
    parser = _parser(
        "watch",
        "Follow a run until it ends. Ctrl-C ends only this command. The exit code is 1 if the run did not finish.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory, or that of an experiment: its newest run")
    options = parser.parse_args(words)
    from roll_tools.runs import watch as follow

    return follow(options.run)


def report(words: Sequence[str], registry: Registry) -> int:
    """Write the report of a run again, or a page that compares several runs."""
    parser = _parser(
        "report",
        "Write report.html of a run directory again, also of a run that is in progress. With several runs, write one"
        " page that compares them.",
    )
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="run directory, or that of an experiment: its newest run"
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, help="page that compares several runs (default: comparison.html)"
    )
    options = parser.parse_args(words)
    if options.out and len(options.runs) == 1:
        parser.error("-o only with several runs: the report of one run is in its directory")
    from roll_core.runtime.records.run_dir import RunDir
    from roll_tools.comparison import write_comparison
    from roll_tools.page import write_report

    found = [RunDir.open(run) for run in options.runs]
    if len(found) == 1:
        written = write_report(found[0].path)
    else:
        written = write_comparison(found, options.out or Path("comparison.html"))
    sys.stdout.write(f"{written}\n")
    return 0


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"roll-core {command}", description=description, allow_abbrev=False)
