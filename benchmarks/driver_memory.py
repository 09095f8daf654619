"""Memory of the driver and its worker processes over thousands of steps: what is kept of each step shows as growth.

    ./run bench driver_memory [--steps 2000] [--executor local ray] [--trace]

Executors that are not named keep the results that they had.

A one-layer model and a few short responses a step, so that thousands of steps are affordable; metrics, samples,
trackers and guards are as a run has them by default. Weights are large enough for oneDNN, and responses differ in
length: oneDNN keeps memory for each number of rows. Growth is measured from a fifth of the steps on, when caches and
allocators have settled. `--trace` prints the source lines whose memory grew most, and writes no results.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

from common import RESULTS, write_result

EXECUTORS = ("local", "ray")
SETTLED = 5
"""One part in so many of the steps comes before growth is measured."""
MARKS = 20
"""Readings of a run."""
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}


def some_reward(prompt: str, response: str, **row: object) -> float:
    """Differs between responses, costs nothing."""
    return sum(map(ord, response)) % 7 / 7


def config_of(folder: Path, executor: str, steps: int) -> dict[str, Any]:
    rows = [{"id": i, "prompt": f"{i:03d}>"} for i in range(256)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    models = {"dtype": "fp32", "disable_gradient_checkpointing": True}
    return {
        "pipeline": "rlvr",
        "output_dir": str(folder / "output"),
        "executor": executor,
        "prompt_length": 8,
        "response_length": 16,
        "max_steps": steps,
        "eval_steps": 0,
        "save_steps": 0,
        "export_model": False,
        "tokenizer": {"kind": "char", "alphabet": "0123456789>"},
        "rollout_batch_size": 4,
        "num_return_sequences_in_group": 4,
        "actor_train": {
            "model_args": models | {"random_init": MODEL},
            "training_args": {"learning_rate": 1e-6, "per_device_train_batch_size": 16},
            "data_args": {"file_name": str(folder / "rows.jsonl")},
            "strategy_args": {"strategy_name": "hf_train"},
            "device_mapping": [0],
        },
        "actor_infer": {
            "model_args": models,
            "strategy_args": {"strategy_name": "hf_infer"},
            "device_mapping": [0],
        },
        "rewards": {"some": {"reward": "function", "function": "driver_memory:some_reward"}},
    }


Marks = dict[str, list[tuple[int, int]]]
"""By process: pairs of a step and anonymous KiB."""


def anonymous_kib(process: str = "self") -> int:
    """Anonymous memory of a process (a pid), without pages of files."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return int(found["RssAnon"].split()[0])


def ray_workers() -> dict[str, int]:
    """Anonymous KiB of this driver's worker processes, by pid; none with the executor `local`."""
    ours, found = f"{os.getpid()}", {}
    for status in Path("/proc").glob("[0-9]*"):
        try:
            name = (status / "cmdline").read_bytes().split(b"\0")[0].decode()
            if name.startswith("ray::RayHost") and ours in ancestors(status.name):
                found[f"worker {status.name}"] = anonymous_kib(status.name)
        except (OSError, KeyError):  # it ended meanwhile
            continue
    return found


def ancestors(process: str) -> list[str]:
    """Pids above a process."""
    found: list[str] = []
    while process not in ("0", "1"):
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        process = fields[1]
        found.append(process)
    return found


def drive(folder: Path, executor: str, steps: int, *, trace: bool) -> Marks:
    """Run in this process; the memory of each process after some of the steps."""
    import yaml

    from roll_core.config import load
    from roll_core.plugins.registry import load_registry
    from roll_core.runtime.records.console import Console
    from roll_core.runtime.run.loop import execute

    marks: Marks = {}
    snapshots: list[tracemalloc.Snapshot] = []

    class Meter(Console):
        """Reads memory as steps are done."""

        def step(self, step: int, metrics: Any, **shown: Any) -> None:
            super().step(step, metrics)
            if trace and step in (steps // SETTLED, steps):
                gc.collect()
                snapshots.append(tracemalloc.take_snapshot())
            if step % (steps // MARKS) == 0:
                gc.collect()
                for process, kib in ({"driver": anonymous_kib()} | ray_workers()).items():
                    marks.setdefault(process, []).append((step, kib))

    path = folder / "memory.yaml"
    path.write_text(yaml.safe_dump(config_of(folder, executor, steps)), encoding="utf-8")
    registry = load_registry()
    if trace:
        tracemalloc.start(12)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        result = execute(load(path, [], registry), registry, console=Meter(stream=nowhere, terminal=False))
    if result.error is not None:
        raise result.error
    if trace:
        before, after = snapshots
        for each in after.compare_to(before, "lineno")[:40]:
            print(each, file=sys.stderr)
        for each in after.compare_to(before, "traceback")[:8]:
            print(each, *each.traceback.format(), sep="\n", file=sys.stderr)
    return marks


def growth(marks: list[tuple[int, int]]) -> float:
    """KiB a step by least squares over the settled readings."""
    settled = marks[len(marks) // SETTLED :]
    mean_step = sum(step for step, _ in settled) / len(settled)
    mean_kib = sum(kib for _, kib in settled) / len(settled)
    spread = sum((step - mean_step) ** 2 for step, _ in settled)
    return sum((step - mean_step) * (kib - mean_kib) for step, kib in settled) / spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--executor", nargs="*", default=list(EXECUTORS), choices=EXECUTORS)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--drive", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        print(json.dumps(drive(Path(arguments.drive), *arguments.executor, arguments.steps, trace=arguments.trace)))
        return
    results: dict[str, Any] = {}
    for executor in arguments.executor:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--drive", folder, "--executor", executor]
            command += ["--steps", str(arguments.steps), *(["--trace"] if arguments.trace else [])]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
        marks = json.loads(done.stdout.strip().splitlines()[-1])
        results[executor] = {
            process: {"marks_kib": each, "kib_per_step": round(growth(each), 3)}
            for process, each in marks.items()
            if len(each) > MARKS // 2  # a process of a few readings was no worker of the run
        }
        print(table(results), flush=True)
    if not arguments.trace:
        path = RESULTS / "driver_memory.json"
        before = json.loads(path.read_text(encoding="utf-8"))["executors"] if path.is_file() else {}
        before = {executor: found for executor, found in before.items() if "driver" in found}
        results = before | results
        write_result("driver_memory", {"executors": results}, table(results))


def table(results: dict[str, Any]) -> str:
    """One row an executor and process."""
    lines = [
        "| executor | process | steps | MiB after a fifth | MiB at the end | KiB a step |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for executor, processes in results.items():
        for process, found in processes.items():
            marks, per_step = found["marks_kib"], found["kib_per_step"]
            first, last = marks[len(marks) // SETTLED][1] / 1024, marks[-1][1] / 1024
            lines.append(
                f"| {executor} | {process.split()[0]} | {marks[-1][0]} | {first:.1f} | {last:.1f} | {per_step:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
