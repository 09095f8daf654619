"""One optimizer step of DPO, reference included, beside TRL's DPOTrainer on the same model and the same tokens.

    ./run bench dpo_step [--steps N] [--shape NAME ...] [--without-peer]

A Qwen3-style model of 256 × 6 with random weights, 16 pairs per step, fp32, one thread each, all activations kept. Both
load the same directory, and a second copy of it as the reference. Ours is `roll-core run` with the pipeline
`preference`. The contestants take turns; the median of all steps but the first counts, in CPU seconds of the process.
Tokens are real ones, without padding. Aim: at least 2 times faster than TRL.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_step import alphabet, make_model
from trl_steps import against_trl, in_turns, main, run_config, slowest, stages

if TYPE_CHECKING:
    import argparse

PAIRS = 16
TOKENS = 2048
"""Tokens of a microbatch of ours."""
SHAPES = {
    "ragged": (512, (8, 64), (16, 128)),
    "long prompts": (512, (160, 224), (8, 32)),
    "large vocabulary": (32_000, (8, 64), (16, 128)),
}
"""Vocabulary, and the ranges of prompt and response lengths in tokens."""


def make_pairs(file: Path, shape: str) -> None:
    """Rows of random characters, each of which is one token."""
    vocab_size, prompts, responses = SHAPES[shape]
    rng, characters = random.Random(0), alphabet(vocab_size)

    def text(lengths: tuple[int, int]) -> str:
        return "".join(rng.choices(characters, k=rng.randint(*lengths)))

    rows = [{"prompt": text(prompts), "chosen": text(responses), "rejected": text(responses)} for _ in range(PAIRS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def ours(folder: Path, steps: int) -> dict[str, Any]:
    """Run in this process; seconds of each step."""
    role = {"model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True}, "device_mapping": [0]}

    def filled(phase: str) -> dict[str, Any]:
        """Microbatches by tokens."""
        return {f"use_dynamic_batching_in_{phase}": True, f"max_tokens_per_microbatch_in_{phase}": TOKENS}

    config = {
        "pipeline": "preference",
        "output_dir": str(folder / "output"),
        "pretrain": str(folder),
        "num_gpus_per_node": len(os.sched_getaffinity(0)),
        "prompt_length": 256,
        "response_length": 256,
        "max_steps": steps,
        "eval_steps": 0,
        "save_steps": 0,
        "track_with": [],
        "export_model": False,
        "beta": 0.1,
        "actor_train": role
        | filled("train")
        | {
            "strategy_args": {"strategy_name": "hf_train"},
            "data_args": {"file_name": str(folder / "pairs.jsonl")},
            "training_args": {"learning_rate": 1e-6, "per_device_train_batch_size": PAIRS},
        },
        "reference": role | filled("infer") | {"strategy_args": {"strategy_name": "hf_infer"}},
    }
    seconds, lines = run_config(folder, config)
    return {"tokens": lines[-1]["tokens/trained"], **seconds}


def measure(shape: str, arguments: argparse.Namespace, trl: Path | None) -> dict[str, Any]:
    """Both take turns. They must train on the same number of tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, SHAPES[shape][0])
        make_pairs(folder / "pairs.jsonl", shape)
        pairs = str(folder / "pairs.jsonl")
        number = str(arguments.steps)
        times, ratios, found = in_turns(
            None if trl is None else [str(trl), "peers/trl_dpo.py", str(folder), pairs, number, "1"],
            [sys.executable, "dpo_step.py", "--ours", str(folder), "--steps", number],
            steps=arguments.steps,
            rounds=arguments.rounds,
        )
    tokens = {each["tokens"] for runs in found.values() for each in runs}
    if len(tokens) > 1:
        raise ValueError(f"{shape}: the contestants trained on different numbers of tokens: {tokens}")
    stages_s = found["roll"][-1]["stages"]
    return {"tokens": tokens.pop(), "times": times, "ratios": ratios, "stages": stages_s, "rounds": found}


def table(shapes: dict[str, dict[str, Any]]) -> str:
    """One row a shape and contestant, and the ratios."""
    lines = ["| shape | vocabulary | tokens | | CPU s | wall s |", "|---|--:|--:|---|--:|--:|"]
    for name, shape in shapes.items():
        lines += [
            f"| {name} | {SHAPES[name][0]:,} | {shape['tokens']:,.0f} | {who} | {s['cpu_s']:.2f} | {s['wall_s']:.2f} |"
            for who, s in shape["times"].items()
        ]
    lines.append("")
    for name, shape in shapes.items():
        lines += [
            f"* {name}:{against_trl(shape['ratios'])}",
            f"  A step by the clock: {stages(shape['stages'])}.",
        ]
    return "\n".join(lines + slowest([shape["ratios"]["cpu_s"] for shape in shapes.values() if shape["ratios"]], 2))


if __name__ == "__main__":
    main(
        "dpo_step",
        __doc__,
        shapes=tuple(SHAPES),
        option="--shape",
        measure=measure,
        ours=ours,
        table=table,
        note=f"{PAIRS} pairs per step, one thread each. Seconds of one step, medians.",
    )
