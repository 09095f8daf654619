"""Steps of ROLL beside steps of a TRL trainer: what `grpo_step`, `dpo_step` and `distill_step` share."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import RESULTS, peer_python, write_result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PEER = ("trl>=0.20", "torch==2.13.0", "transformers<6", "datasets")


def run_config(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Run a config in this process. Returns the seconds of each step but the first, and the lines of the metrics."""
    import yaml

    from roll_core.config import load
    from roll_core.plugins.registry import load_registry
    from roll_core.runtime.records.console import Console
    from roll_core.runtime.run.loop import execute

    class Clock(Console):
        """Reads the clocks after each step."""

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.marks: list[tuple[float, float]] = []

        def step(self, step: int, metrics: Any, **shown: Any) -> None:
            self.marks.append((time.process_time(), time.perf_counter()))

    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    registry = load_registry()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        clock = Clock(stream=nowhere, terminal=False)
        result = execute(load(path, [], registry), registry, console=clock)
    if result.error is not None:
        raise result.error
    lines = [json.loads(line) for line in result.run_dir.metrics.read_text(encoding="utf-8").splitlines()]
    pairs = list(zip(clock.marks, clock.marks[1:], strict=False))
    seconds = {
        "cpu_s": [b[0] - a[0] for a, b in pairs],
        "wall_s": [b[1] - a[1] for a, b in pairs],
        "stages": {k: statistics.median(line[k] for line in lines[1:]) for k in lines[-1] if k.startswith("time/")},
    }
    return seconds, lines


def run_peer(command: Sequence[str]) -> dict[str, Any]:
    """The JSON on the last line of what a contestant prints."""
    folder = Path(__file__).resolve().parent
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def in_turns(
    trl: Sequence[str] | None, roll: Sequence[str], *, steps: int, rounds: int
) -> tuple[dict[str, dict[str, float]], dict[str, float], dict[str, list[dict[str, Any]]]]:
    """Run the commands in turns. Returns medians of all steps but each round's first, TRL's over ours, and all."""
    found: dict[str, list[dict[str, Any]]] = {"roll": []} if trl is None else {"trl": [], "roll": []}
    for _ in range(rounds):
        if trl is not None:
            found["trl"].append(run_peer(trl))
        found["roll"].append(run_peer(roll))
    summary = {
        who: {
            what: statistics.median(value for each in runs for value in each[what][-(steps - 1) :])
            for what in ("cpu_s", "wall_s")
        }
        for who, runs in found.items()
    }
    ratios = {} if trl is None else {what: summary["trl"][what] / summary["roll"][what] for what in ("cpu_s", "wall_s")}
    return summary, ratios, found


def against_trl(ratios: dict[str, float]) -> str:
    """The two ratios, for a table's notes; empty without the peer."""
    if not ratios:
        return ""
    return f" {ratios['cpu_s']:.1f} × TRL by CPU time and {ratios['wall_s']:.1f} × by the clock."


def stages(found: dict[str, float]) -> str:
    """Stages of a step of ours, by the clock."""
    return ", ".join(f"{k.removeprefix('time/')} {v:.2f} s" for k, v in found.items() if k != "time/step")


def slowest(ratios: Sequence[float], aim: float) -> list[str]:
    """Lines on the smallest ratio; none without the peer."""
    if not ratios:
        return []
    verdict = "met" if min(ratios) >= aim else "missed"
    return ["", f"The slowest is {min(ratios):.1f} × TRL; the aim of {aim:g} is {verdict}."]


def main(
    name: str,
    description: str | None,
    *,
    shapes: Sequence[Any],
    option: str,
    measure: Callable[[Any, argparse.Namespace, Path | None], dict[str, Any]],
    ours: Callable[[Path, int], dict[str, Any]],
    table: Callable[[dict[str, dict[str, Any]]], str],
    note: str = "Seconds of one step, medians.",
    steps: int = 4,
) -> None:
    """Measure the shapes that `option` names, and write them beside the results of the others.

    With `--ours FOLDER`, in the process of one contestant: print what `ours` returns.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(option, dest="shapes", type=type(shapes[0]), nargs="*", default=list(shapes))
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--ours", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ours:
        print(json.dumps(ours(Path(arguments.ours), arguments.steps)))
        return
    trl, version = None, ""
    if not arguments.without_peer:
        trl = Path(peer_python("trl", PEER))
        ask = [str(trl), "-c", "import importlib.metadata as m; print(m.version('trl'))"]
        version = subprocess.run(ask, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    path = RESULTS / f"{name}.json"
    earlier = json.loads(path.read_text(encoding="utf-8")).get("shapes", {}) if path.is_file() else {}
    measured: dict[str, dict[str, Any]] = {}
    for shape in arguments.shapes:
        measured[str(shape)] = measure(shape, arguments, trl)
        print(table(measured), flush=True)
        if trl is not None:
            every = earlier | measured
            merged = {key: every[key] for key in map(str, shapes) if key in every}
            write_result(name, {"trl": version, "shapes": merged}, f"TRL {version}. {note}\n\n{table(merged)}")
