"""What `roll-core plan` predicts beside what runs take: peak memory of each process, by strategy.

    ./run bench plan_memory [--contestants NAME ...]

Runs of `pipeline: sft` with a random model of 54.6 million parameters on the host, two optimizer steps on rows of full
length, each by `roll-core run`. The record of a run has what was predicted for each of its
processes and what was measured: the most that the process held over what it held before it built anything, pages of
files left out. The error is (predicted - measured) / measured.

The prediction is of memory in use. glibc keeps much of what is freed, up to pieces of 32 MiB, which can double what a
process holds: so runs are measured with MALLOC_MMAP_THRESHOLD_=1048576, which makes it give larger pieces back. With
`--keeps-freed` it is left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import peer_python, write_result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PACKAGES = ("roll-core", "roll-strategy-fsdp2", "roll-strategy-deepspeed[engine]")
STEPS = 2
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
MIB = 2**20
MODEL = {
    "model_type": "qwen3", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
"""54.6 million parameters."""


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


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


CASES = {
    "hf": Case(strategy="hf_train"),
    "fsdp2, 2 ranks": Case(strategy="fsdp2_train", ranks=2),
    "zero 2": Case(strategy="deepspeed_train", ranks=2, keys=zero(2)),
    "zero 3": Case(strategy="deepspeed_train", ranks=2, keys=zero(3)),
}


def config_of(case: Case) -> dict[str, Any]:
    """As it would stand in a file. JSON is YAML."""
    response = case.length // 2
    return {
        "pipeline": "sft",
        "exp_name": "plan-memory",
        "output_dir": "output",
        "max_steps": STEPS,
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
                "random_init": dict(MODEL),
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


def run(python: Path, case: Case, folder: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rows of the run's record."""
    folder.mkdir()
    write_rows(folder / "rows.jsonl", case.length)
    (folder / "run.yaml").write_text(json.dumps(config_of(case)), encoding="utf-8")
    quiet = os.environ.get("ROLL_BENCH_QUIET", "1") != "0"
    subprocess.run(
        [str(python), "-m", "roll_core", "run", "run.yaml"],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.DEVNULL if quiet else None,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false", **environment},
    )
    record = json.loads((folder / "output" / "plan-memory" / "001" / "run.json").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = record["memory"]
    return rows


def measure(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """By name: MiB of the process for which the prediction is worst."""
    python = peer_python("train_backends", [part for each in PACKAGES for part in ("-e", f"./packages/{each}")])
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            rows = run(python, CASES[name], Path(temporary) / str(len(found)), environment)
            worst = max(rows, key=lambda row: abs(row["predicted_bytes"] / row["measured_bytes"] - 1))
            found[name] = {
                "predicted_mib": round(worst["predicted_bytes"] / MIB, 1),
                "measured_mib": [round(row["measured_bytes"] / MIB, 1) for row in rows],
                "error": round(worst["predicted_bytes"] / worst["measured_bytes"] - 1, 4),
            }
            print(name, found[name], flush=True)
    return found


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
    options = parser.parse_args()
    found = measure(options.contestants, {} if options.keeps_freed else GIVES_BACK)
    print(table(found))
    if not options.keeps_freed and options.contestants == list(CASES):
        write_result("plan_memory", {"steps": STEPS, "cases": found}, table(found))


if __name__ == "__main__":
    main()
