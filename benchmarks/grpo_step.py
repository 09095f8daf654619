"""One GRPO step, rollouts included, beside TRL's GRPOTrainer on the same model and the same work.

    ./run bench grpo_step [--steps N] [--rounds N] [--vocabulary N ...] [--without-peer]

A Qwen3-style model of 256 × 6 with random weights, 16 prompts × 8 samples × at most 32 new tokens, one optimizer step
of 128 sequences, fp32. Both load the same directory. Ours is `roll-core run` with the rlvr pipeline, rewards in
processes of their own and weight sync with its proof included. Aim: at least 4 times faster than TRL.

With a vocabulary of 14 a random model soon ends its responses, which are ragged; with 510 or 32,000 nearly all have
their full length. Vocabularies that are not named keep the results that they had. The training half is measured once
more by itself, beside its matrix products alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, peer_python, write_result

PROMPTS, SAMPLES, NEW_TOKENS = 16, 8, 32
PROMPT_TOKENS = 12
LEARNING_RATE = 1e-7  # so small that answers stay as long as they are at the beginning, for both
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}
ALPHABET = "0123456789+="
VOCABULARIES = (14, 510, 32_000)
SPECIAL_TOKENS = 2
TIMES = 4
"""How often the training half and its products are measured, in turns."""


def some_reward(prompt: str, response: str, **row: object) -> float:
    """Differs between answers, costs nothing."""
    return sum(map(ord, response)) % 7 / 7


def alphabet(vocab_size: int) -> str:
    """Digits and signs of the prompts, then ideographs and syllables that only the vocabulary needs."""
    more = vocab_size - SPECIAL_TOKENS - len(ALPHABET)
    places = [*range(0x4E00, 0xA000), *range(0xAC00, 0xD7A4)][:more]
    return ALPHABET + "".join(map(chr, places))


def make_model(folder: Path, vocab_size: int) -> None:
    """The directory that both contestants load."""
    from roll_core.data.tokenizers import make_tokenizer
    from roll_core.spec.config import TokenizerConfig
    from roll_core.spec.model import ModelSpec
    from roll_modeling.model import load_model

    tokenizer = make_tokenizer(TokenizerConfig(kind="char", alphabet=alphabet(vocab_size)), [], folder)
    if len(tokenizer) != vocab_size:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, not {vocab_size}")
    load_model(ModelSpec(random_init=MODEL, tokenizer=str(folder), seed=0)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ours(folder: Path, steps: int) -> dict[str, Any]:
    """Run in this process; seconds of each step."""
    import yaml

    from roll_core.config import load
    from roll_core.plugins.registry import load_registry
    from roll_core.runtime.records.console import Console
    from roll_core.runtime.run.loop import execute

    class Clock(Console):
        """Notes the clocks after each step."""

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.marks: list[tuple[float, float]] = []

        def step(self, step: int, metrics: Any) -> None:
            self.marks.append((time.process_time(), time.perf_counter()))

    rows = [{"id": i, "prompt": f"{i % 100:02d}+{(7 * i) % 100:02d}=" * 2} for i in range(PROMPTS * steps)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    role = {"model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True}, "device_mapping": [0]}
    config = {
        "pipeline": "rlvr",
        "output_dir": str(folder / "output"),
        "pretrain": str(folder),
        "prompt_length": 32,
        "response_length": NEW_TOKENS,
        "max_steps": steps,
        "eval_steps": 0,
        "save_steps": 0,
        "track_with": [],
        "export_model": False,
        "rollout_batch_size": PROMPTS,
        "num_return_sequences_in_group": SAMPLES,
        "actor_train": role
        | {
            "strategy_args": {"strategy_name": "hf_train"},
            "data_args": {"file_name": str(folder / "rows.jsonl")},
            "training_args": {"learning_rate": LEARNING_RATE, "per_device_train_batch_size": PROMPTS * SAMPLES},
        },
        "actor_infer": role | {"strategy_args": {"strategy_name": "hf_infer"}},
        "rewards": {"some": {"reward": "function", "function": "grpo_step:some_reward"}},
    }
    path = folder / "grpo.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    registry = load_registry()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        clock = Clock(stream=nowhere, terminal=False)
        result = execute(load(path, [], registry), registry, console=clock)
    if result.error is not None:
        raise result.error
    lines = [json.loads(line) for line in result.run_dir.metrics.read_text(encoding="utf-8").splitlines()]
    pairs = list(zip(clock.marks, clock.marks[1:], strict=False))
    return {
        "cpu_s": [b[0] - a[0] for a, b in pairs],
        "wall_s": [b[1] - a[1] for a, b in pairs],
        "mean_length": statistics.fmean(line["response_length/mean"] for line in lines),
        "samples": PROMPTS * SAMPLES * steps,
        "stages": {k: statistics.median(line[k] for line in lines[1:]) for k in lines[-1] if k.startswith("time/")},
    }


def training_half(vocab_size: int, response_tokens: int) -> dict[str, float]:
    """CPU seconds of forward, backward and optimizer step on a step's sequences, and of their matrix products alone."""
    import numpy as np
    from sft_step import attention_flops, gemms_of_a_step, make_strategy, timed

    from roll_core.algorithms.losses import SFTObjective
    from roll_core.data.pack import pack
    from roll_core.data.tokenizers import make_tokenizer
    from roll_core.spec.config import TokenizerConfig
    from roll_core.types import TrainSequence

    rng = np.random.default_rng(0)
    length = PROMPT_TOKENS + response_tokens
    sequences = [
        TrainSequence(
            id=str(i), tokens=rng.integers(0, vocab_size, length), loss_mask=np.arange(length) >= PROMPT_TOKENS
        )
        for i in range(PROMPTS * SAMPLES)
    ]
    micros = pack(sequences, max_tokens=PROMPTS * SAMPLES * length)
    gemms = gemms_of_a_step(micros, vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(TokenizerConfig(kind="char", alphabet=ALPHABET), [], Path(folder))
        strategy = make_strategy(vocab_size, Path(folder), len(os.sched_getaffinity(0)))

    def step() -> None:
        strategy.forward_backward(micros, SFTObjective())
        strategy.optimizer_step()

    step()
    gemms()
    pairs = [(timed(step)["cpu_s"], timed(gemms)["cpu_s"]) for _ in range(TIMES)]
    strategy.close()
    step_s, gemms_s = (min(each) for each in zip(*pairs, strict=True))
    share = gemms_s / step_s * (1 + attention_flops(sequences, micros, vocab_size))
    return {"tokens": PROMPTS * SAMPLES * length, "cpu_s": step_s, "gemms_cpu_s": gemms_s, "share": share}


def run_peer(command: list[str]) -> dict[str, Any]:
    """The JSON on the last line of what a contestant prints."""
    folder = Path(__file__).resolve().parent
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure(vocab_size: int, steps: int, rounds: int, trl: Path | None) -> dict[str, Any]:
    """Both take turns; medians of all steps but each round's first."""
    found: dict[str, list[dict[str, Any]]] = {"roll": []} | ({"trl": []} if trl is not None else {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, vocab_size)
        numbers = [str(n) for n in (steps, PROMPTS, SAMPLES, NEW_TOKENS)]
        for _ in range(rounds):
            if trl is not None:
                found["trl"].append(run_peer([str(trl), "peers/trl_grpo.py", str(folder), *numbers]))
            found["roll"].append(
                run_peer([sys.executable, "grpo_step.py", "--ours", str(folder), "--steps", str(steps)])
            )

    def median(who: str, what: str) -> float:
        return statistics.median(value for each in found[who] for value in each[what][-(steps - 1) :])

    summary = {
        who: {
            "cpu_s": median(who, "cpu_s"),
            "wall_s": median(who, "wall_s"),
            "mean_length": found[who][0]["mean_length"],
        }
        for who in found
    }
    ratios = {}
    if trl is not None:
        ratios = {what: summary["trl"][what] / summary["roll"][what] for what in ("cpu_s", "wall_s")}
    return {
        "summary": summary,
        "ratios": ratios,
        "training_half": training_half(vocab_size, round(summary["roll"]["mean_length"])),
        "stages": found["roll"][-1]["stages"],
        "rounds": found,
    }


def table(shapes: dict[str, dict[str, Any]]) -> str:
    """One row a vocabulary and contestant, then what each vocabulary shows."""
    lines = ["| vocabulary | | CPU s | wall s | tokens per response |", "|--:|---|--:|--:|--:|"]
    for vocab_size, shape in shapes.items():
        lines += [
            f"| {int(vocab_size):,} | {who} | {s['cpu_s']:.2f} | {s['wall_s']:.2f} | {s['mean_length']:.1f} |"
            for who, s in shape["summary"].items()
        ]
    lines.append("")
    for vocab_size, shape in shapes.items():
        half, ratios, stages = shape["training_half"], shape["ratios"], shape["stages"]
        spent = ", ".join(f"{k.removeprefix('time/')} {v:.2f} s" for k, v in stages.items() if k != "time/step")
        told = ""
        if ratios:
            told = f" {ratios['cpu_s']:.1f} × TRL by CPU time and {ratios['wall_s']:.1f} × by the clock."
        lines += [
            f"* Vocabulary {int(vocab_size):,}:{told} The training half alone ({half['tokens']:,} tokens) takes"
            f" {half['cpu_s']:.2f} CPU s, {half['share']:.0%} of the GEMM rate: its matrix products without those of"
            f" attention take {half['gemms_cpu_s']:.2f} s.",
            f"  A step by the clock: {spent}.",
        ]
    slowest = min((r for shape in shapes.values() for r in shape["ratios"].values()), default=None)
    if slowest is not None:
        lines += ["", f"The slowest is {slowest:.1f} × TRL; the aim of 4 is {'met' if slowest >= 4 else 'missed'}."]
    return "\n".join(lines)


def main() -> None:
    """Measure the vocabularies that are named, and write them beside the results of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, nargs="*", default=list(VOCABULARIES))
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--ours", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ours:
        print(json.dumps(ours(Path(arguments.ours), arguments.steps)))
        return
    trl, version = None, ""
    if not arguments.without_peer:
        trl = Path(peer_python("trl", ["trl>=0.20", "torch==2.13.0", "transformers<6", "datasets"]))
        version = subprocess.run(
            [str(trl), "-c", "import importlib.metadata as m; print(m.version('trl'))"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.strip()
    shapes: dict[str, dict[str, Any]] = {}
    for vocab_size in arguments.vocabulary:
        shapes[str(vocab_size)] = measure(vocab_size, arguments.steps, arguments.rounds, trl)
        print(table(shapes), flush=True)
    if trl is None:
        return
    path = RESULTS / "grpo_step.json"
    before = json.loads(path.read_text(encoding="utf-8")).get("shapes", {}) if path.is_file() else {}
    merged = before | shapes
    merged = {key: merged[key] for key in sorted(merged, key=int)}
    told = f"TRL {version}. Seconds of one step, medians.\n\n{table(merged)}"
    write_result("grpo_step", {"trl": version, "shapes": merged}, told)


if __name__ == "__main__":
    main()
