"""What `roll-core plan` predicts beside what runs take: peak memory of each process, by strategy.

    ./run bench plan_memory [--contestants NAME ...]
    ./run bench plan_memory --cost [NAME]

Runs of `pipeline: sft` with random models of 55, 126 and 285 million parameters on the host, two optimizer steps on
rows of full length, each by `roll-core run`. The files of a run have what was predicted for each of its
processes and what was measured: the most that the process held over what it held before it built anything, pages of
files left out. The error is (predicted - measured) / measured.

The prediction is of memory in use. glibc keeps much of what is freed, up to pieces of 32 MiB, which can double what a
process holds: so runs are measured with MALLOC_MMAP_THRESHOLD_=65536, which makes it give larger pieces back. With
`--keeps-freed` it is left as it is. `--cost` says what thresholds cost in time: runs with and without in turn, and the
ratio of the medians of their steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import RESULTS, peer_python, write_result

from roll_core.runtime.records.run_dir import RunDir
from roll_tools.saved_record import read_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PACKAGES = (
    "roll-core",
    "roll-modeling",
    "roll-rewards",
    "roll-strategy-hf",
    "roll-strategy-fsdp2",
    "roll-strategy-deepspeed",
    "roll-tools",
    "roll-trackers",
    "roll-weight-transports",
)
DESPITE = ["deepspeed>=0.19,<0.20"]
STEPS = 2
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
GIVES_BACK = {THRESHOLD: "65536"}
COST_OF = (None, "1048576", "65536")
COST_STEPS, COST_ROUNDS = 12, 3
MIB = 2**20
MODEL = {
    "model_type": "qwen3", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
"""54.6 million parameters."""
LARGER = MODEL | {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
}
"""125.8 million."""
LARGEST = MODEL | {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
"""285 million."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    strategy: str
    ranks: int = 1
    keys: Mapping[str, Any] = field(default_factory=dict)
    """`strategy_config`."""
    dtype: str = "fp32"
    recompute: bool = True
    length: int = 128
    sequences: int = 2
    accumulate: int = 1
    model: Mapping[str, Any] = field(default_factory=lambda: MODEL)


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


CASES = {
    "hf": Case(strategy="hf_train"),
    "fsdp2, 2 ranks": Case(strategy="fsdp2_train", ranks=2),
    "zero 2": Case(strategy="deepspeed_train", ranks=2, keys=zero(2)),
    "zero 3": Case(strategy="deepspeed_train", ranks=2, keys=zero(3)),
    "zero 2, 2 microbatches": Case(strategy="deepspeed_train", ranks=2, keys=zero(2), accumulate=2),
    "hf, 126 M": Case(strategy="hf_train", model=LARGER),
    "fsdp2, 126 M": Case(strategy="fsdp2_train", ranks=2, model=LARGER),
    "zero 2, 126 M": Case(strategy="deepspeed_train", ranks=2, keys=zero(2), model=LARGER),
    "zero 3, 126 M": Case(strategy="deepspeed_train", ranks=2, keys=zero(3), model=LARGER),
    "hf, 285 M": Case(strategy="hf_train", model=LARGEST),
    "fsdp2, 285 M": Case(strategy="fsdp2_train", ranks=2, model=LARGEST),
    "zero 2, 285 M": Case(strategy="deepspeed_train", ranks=2, keys=zero(2), model=LARGEST),
    "zero 3, 285 M": Case(strategy="deepspeed_train", ranks=2, keys=zero(3), model=LARGEST),
}


def config_of(case: Case, steps: int = STEPS) -> dict[str, Any]:
    """As it would stand in a file. JSON is YAML."""
    response = case.length // 2
    return {
        "pipeline": "sft",
        "exp_name": "plan-memory",
        "output_dir": "output",
        "max_steps": steps,
        "save_steps": 0,
        "eval_steps": 0,
        "export_model": False,
        "track_with": [],
        "tokenizer": {"kind": "byte"},
        "num_gpus_per_node": case.ranks,
        "prompt_length": case.length - response,
        "response_length": response,
        "sft_train": {
            "model_args": {
                "dtype": case.dtype,
                "random_init": dict(case.model),
                "disable_gradient_checkpointing": not case.recompute,
            },
            "training_args": {
                "learning_rate": 1e-4,
                "per_device_train_batch_size": case.sequences,
                "gradient_accumulation_steps": case.accumulate,
            },
            "data_args": {"file_name": "rows.jsonl"},
            "strategy_args": {"strategy_name": case.strategy, "strategy_config": dict(case.keys)},
            "device_mapping": list(range(case.ranks)),
        },
    }


def write_rows(file: Path, length: int) -> None:
    """Rows that fill prompt and response to the last token: one character is one token, and one ends the response."""
    response = length // 2
    prompt = "ab" * (length - response)
    row = {"prompt": prompt[: length - response], "response": "c" * (response - 1)}
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(64)), encoding="utf-8")


def run(python: Path, case: Case, folder: Path, environment: Mapping[str, str], steps: int = STEPS) -> Path:
    """The run's directory."""
    folder.mkdir()
    write_rows(folder / "rows.jsonl", case.length)
    (folder / "run.yaml").write_text(json.dumps(config_of(case, steps)), encoding="utf-8")
    quiet = os.environ.get("ROLL_BENCH_QUIET", "1") != "0"
    subprocess.run(
        [str(python), "-m", "roll_core", "run", "run.yaml"],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.DEVNULL if quiet else None,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false", **environment},
    )
    return folder / "output" / "plan-memory" / "001"


def interpreter() -> Path:
    """Of an environment with every strategy."""
    return peer_python(
        "train_backends", [part for each in PACKAGES for part in ("-e", f"./packages/{each}")], despite=DESPITE
    )


def measure(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """By name: MiB of the process for which the prediction is worst."""
    python = interpreter()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            folder = run(python, CASES[name], Path(temporary) / str(len(found)), environment)
            rows = read_memory(RunDir(folder))
            worst = max(rows, key=lambda row: abs(row["predicted_bytes"] / row["measured_bytes"] - 1))
            found[name] = {
                "predicted_mib": round(worst["predicted_bytes"] / MIB, 1),
                "measured_mib": [round(row["measured_bytes"] / MIB, 1) for row in rows],
                "error": round(worst["predicted_bytes"] / worst["measured_bytes"] - 1, 4),
            }
            print(name, found[name], flush=True)
    return found


def cost(name: str) -> dict[str, float]:
    """By threshold: the median step over that of glibc as it is. Runs take turns, and first steps do not count."""
    python, steps = interpreter(), {each: list[float]() for each in COST_OF}
    with tempfile.TemporaryDirectory() as temporary:
        for turn in range(COST_ROUNDS):
            for threshold in COST_OF:
                environment = {} if threshold is None else {THRESHOLD: threshold}
                folder = run(python, CASES[name], Path(temporary) / f"{turn}-{threshold}", environment, COST_STEPS)
                lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                steps[threshold] += [json.loads(line)["time/step"] for line in lines[2:]]
    usual = statistics.median(steps[None])
    return {str(threshold): statistics.median(times) / usual for threshold, times in steps.items()}


def table(found: Mapping[str, Any]) -> str:
    """For readers."""
    lines = [
        "| run | ranks | microbatch | recomputation | predicted, MiB | measured, MiB | error |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    for name, each in found.items():
        case = CASES[name]
        lines.append(
            f"| {name} | {case.ranks} | {case.sequences} × {case.length}"
            f" | {'yes' if case.recompute else 'no'} | {each['predicted_mib']:.0f}"
            f" | {', '.join(f'{one:.0f}' for one in each['measured_mib'])} | {each['error']:+.1%} |"
        )
    worst = max(abs(each["error"]) for each in found.values())
    lines += ["", f"The largest error is {worst:.1%}. Where a run has two processes both are given."]
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, and write it to benchmarks/results/plan_memory.*."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--keeps-freed", action="store_true", help="with glibc's allocator as it is; writes no results")
    parser.add_argument(
        "--cost", nargs="?", choices=list(CASES), const="fsdp2, 2 ranks", help="what thresholds cost in time"
    )
    options = parser.parse_args()
    if options.cost:
        for threshold, ratio in cost(options.cost).items():
            print(f"{THRESHOLD}={threshold}: a step takes {ratio:.3f} of the time")
        return
    found = measure(options.contestants, {} if options.keeps_freed else GIVES_BACK)
    if not options.keeps_freed:
        path = RESULTS / "plan_memory.json"
        earlier = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.is_file() else {}
        found = {name: case for name in CASES if (case := found.get(name, earlier.get(name)))}
        write_result("plan_memory", {"steps": STEPS, "cases": found}, table(found))
    print(table(found))


if __name__ == "__main__":
    main()
