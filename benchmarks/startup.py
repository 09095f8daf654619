"""What a command costs before it does anything: CPU milliseconds (user + system) of cold processes.

    ./run bench startup [--runs 15] [--rows plugins check ...]

Cold means a new process; files are in the page cache and Python's bytecode is compiled, as after a first call. The rows
take turns, so that a busy machine is busy for all of them. To measure another command, add a line to ROWS.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import REPOSITORY, write_result

ROLL_CORE = [sys.executable, "-c", "import sys; from roll_core.cli.main import main; sys.exit(main())"]
PLAIN = """\
pipeline: rlvr
actor_train:
  data_args: {file_name: prompts.jsonl}
  strategy_args: {strategy_name: hf_train}
actor_infer:
  strategy_args: {strategy_name: hf_infer}
rewards:
  math: {reward: math_rule}
"""
NO_FILES = [*ROLL_CORE, "check", "--no-files"]
QUICKSTART = str(REPOSITORY / "examples" / "quickstart" / "grpo.yaml")
SFT = str(REPOSITORY / "examples" / "quickstart" / "sft.yaml")

FIRST_STEP = [
    sys.executable, "-m", "roll_core", "run", str(REPOSITORY / "examples" / "quickstart" / "sft.yaml"),
    "max_steps=1", "eval_steps=0", "export_model=false", "output_dir=.",
    f"sft_train.data_args.file_name={REPOSITORY / 'examples' / 'quickstart' / 'data' / 'sft.jsonl'}",
    f"validation.data_args.file_name={REPOSITORY / 'examples' / 'quickstart' / 'data' / 'val.jsonl'}",
]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One command. `target_ms` is the aim, where there is one."""

    name: str
    command: list[str]
    what: str
    target_ms: float | None = None


ROWS = [
    Row("python", [sys.executable, "-c", "pass"], "the interpreter alone, for comparison"),
    Row("version", [*ROLL_CORE, "--version"], "roll-core --version"),
    Row("plugins", [*ROLL_CORE, "plugins"], "roll-core plugins", 150),
    Row("check", [*ROLL_CORE, "check", "plain.yaml"], "check of a file without fragments, and of one row", 500),
    Row("check_quickstart", [*NO_FILES, QUICKSTART], "check --no-files of the quick start's GRPO, a fragment", 500),
    Row("check_override", [*NO_FILES, QUICKSTART, "max_steps=3"], "the same with an override", 500),
    Row("plan", [*ROLL_CORE, "plan", SFT, "--host-memory", "64"], "plan of the quick start's SFT", 1000),
    Row("first_step", FIRST_STEP, "the quick start's first training step, and the end of the run", 12_000),
]


def cpu_ms(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    """CPU time of one process, its children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def measure(rows: list[Row], runs: int) -> dict[str, list[float]]:
    """CPU milliseconds by row, one after a first call that is not counted."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "plain.yaml").write_text(PLAIN, encoding="utf-8")
        (folder / "prompts.jsonl").write_text('{"prompt": "1 + 1?", "ground_truth": "2"}\n', encoding="utf-8")
        # Bytecode is kept where it disturbs nobody, even if the environment forbids it elsewhere.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        environment["PYTHONPATH"] = str(REPOSITORY)  # where the quick start's reward is
        found: dict[str, list[float]] = {row.name: [] for row in rows}
        for number in range(runs + 1):
            for row in rows:
                spent = cpu_ms(row.command, folder, environment)
                if number:
                    found[row.name].append(spent)
    return found


def main() -> None:
    """Measure, print a table, and write it to benchmarks/results/startup.*."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], default=[row.name for row in ROWS])
    options = parser.parse_args()
    rows = [row for row in ROWS if row.name in options.rows]
    subprocess.run([sys.executable, str(REPOSITORY / "examples" / "quickstart" / "make_data.py")], check=True)
    found = measure(rows, options.runs)
    results, lines = {}, ["| row | median | least | aim | what |", "|---|--:|--:|--:|---|"]
    for row in rows:
        median, least = statistics.median(found[row.name]), min(found[row.name])
        results[row.name] = {
            "median_ms": round(median, 1),
            "least_ms": round(least, 1),
            "target_ms": row.target_ms,
            "met": None if row.target_ms is None else median <= row.target_ms,
            "what": row.what,
        }
        aim = "" if row.target_ms is None else f"≤ {row.target_ms:g}"
        lines.append(f"| {row.name} | {median:.0f} | {least:.0f} | {aim} | {row.what} |")
    table = "\n".join(lines)
    print(table)
    path = write_result(
        "startup",
        {"unit": "CPU milliseconds, user + system, of a cold process", "runs": options.runs, "rows": results},
        f"CPU milliseconds (user + system) of cold processes, {options.runs} runs each.\n\n{table}",
    )
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
