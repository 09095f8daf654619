"""Compare asynchronous and synchronous GRPO: the same task, model, data and number of steps on two cores.

    ./run bench async_vs_sync [--seeds N] [--steps N] [--ratios 1 2] [--learning-rates 2e-4 5e-4]

The task is to sort digits; most prompts are short and a few are long. For each seed, a Qwen3-style model with random
weights is trained by SFT on responses of which 60 % have the last two digits swapped. Then `roll-core run` continues
with GRPO and the embedded engine, in each mode:

    synchronous     trainer and engine alternate on both cores, in one process
    asynchronous    trainer and engine have a core and a process each; generation is `async_generation_ratio` batches
                    ahead, weights change during generation, and importance weights correct for older ones
    clipped         as asynchronous, but PPO's ratio uses the engine's logprobs, and clips
    uncorrected     neither correction

Seconds are those of the steps without evaluations and the start of processes. Accuracy is measured on held-out prompts
after the last step. The modes of one seed run one after the other, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import RESULTS, write_result

LONGEST = 24
MISTAKES = 0.6
"""Share of the SFT responses whose last two digits are swapped."""
PROMPTS, ANSWERS = 32, 8
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}
SYNC = "synchronous"
OTHERWISE: dict[str, dict[str, Any]] = {
    "clipped": {"force_disable_old_logprobs_recompute": True},
    "uncorrected": {"train_infer_correction": {"is_weight": {"enabled": False}}},
}
"""Other treatments of off-policy responses, by mode."""


def is_right(prompt: str, response: str, ground_truth: str) -> float:
    """1 or 0."""
    return float(response == ground_truth)


def write_rows(path: Path, count: int, seed: int) -> None:
    """Lengths are long-tailed: a median of 4 and, for one row in forty, more than 12."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as stream:
        for index in range(count):
            length = min(LONGEST, 2 + int(rng.expovariate(1 / 3.0)))
            digits = "".join(rng.choices("0123456789", k=length))
            answer = "".join(sorted(digits))
            taught = answer[:-2] + answer[:-3:-1] if rng.random() < MISTAKES else answer
            row = {"id": index, "prompt": f"{digits}>", "response": taught, "ground_truth": answer}
            stream.write(json.dumps(row) + "\n")


def base(folder: Path, seed: int) -> dict[str, Any]:
    """What all runs share."""
    return {
        "output_dir": str(folder / "output"),
        "seed": seed,
        "prompt_length": LONGEST + 2,
        "response_length": LONGEST + 2,
        "track_with": [],
        "save_steps": 0,
    }


def trainer(folder: Path, file: str, **training: Any) -> dict[str, Any]:
    return {
        "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
        "training_args": training,
        "data_args": {"file_name": str(folder / file)},
        "strategy_args": {"strategy_name": "hf_train"},
        "device_mapping": [0],
        "infer_batch_size": 512,
    }


def engine(slot: int) -> dict[str, Any]:
    return {
        "model_args": {"dtype": "fp32"},
        "strategy_args": {"strategy_name": "hf_infer"},
        "device_mapping": [slot],
    }


def sft(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """The model that both modes begin with."""
    role = trainer(
        folder,
        "train.jsonl",
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=min(20, steps // 2),
        per_device_train_batch_size=128,
        gradient_accumulation_steps=1,
    )
    role["model_args"]["random_init"] = MODEL
    return base(folder, seed) | {
        "pipeline": "sft",
        "exp_name": "sft",
        "max_steps": steps,
        "eval_steps": 0,
        "tokenizer": {"kind": "char", "alphabet": "0123456789>"},
        "sft_train": role,
    }


def grpo(folder: Path, seed: int, args: argparse.Namespace, rate: float, ratio: float) -> dict[str, Any]:
    """One of the modes. `ratio` 0 is synchronous."""
    per_step, steps = PROMPTS * ANSWERS, args.steps
    config = base(folder, seed) | {
        "pipeline": "rlvr",
        "exp_name": f"grpo-{rate:g}-{ratio:g}",
        "pretrain": str(folder / "output" / "sft" / "latest" / "export"),
        "max_steps": steps,
        "eval_steps": steps,
        "export_model": False,
        "rewards": {"sorting": {"reward": "function", "function": "async_vs_sync:is_right"}},
        "validation": {
            "data_args": {"file_name": str(folder / "val.jsonl")},
            "generating_args": {"temperature": 1.0, "seed": 0},
        },
        "rollout_batch_size": PROMPTS,
        "num_return_sequences_in_group": ANSWERS,
        "actor_train": trainer(
            folder,
            "train.jsonl",
            learning_rate=rate,
            lr_scheduler_type="linear",
            warmup_steps=min(5, steps // 2),
            per_device_train_batch_size=per_step // 2,
            gradient_accumulation_steps=2,
        ),
        "actor_infer": engine(0),
        "executor": "local",
        "num_gpus_per_node": 1,
    }
    if ratio:
        config |= {
            "actor_infer": engine(1),
            "async_generation_ratio": ratio,
            "executor": "ray",
            "num_gpus_per_node": 2,
        }
    return config


def run(folder: Path, config: dict[str, Any]) -> list[dict[str, float]]:
    """`roll-core run` in a process of its own; the lines of its metrics."""
    path = folder / f"{config['exp_name']}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    here = Path(__file__).resolve().parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH", "")]))}
    done = subprocess.run(
        [sys.executable, "-m", "roll_core", "run", str(path)], cwd=folder, env=env, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{config['exp_name']} of seed {config['seed']} failed:\n{done.stdout[-2000:]}")
    metrics = folder / "output" / config["exp_name"] / "latest" / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def measured(lines: list[dict[str, float]]) -> dict[str, float]:
    """One run of a mode. The first steps are left out of the seconds: what is compiled is compiled there."""
    steps = [line for line in lines if line["step"] > min(2, len(lines) // 2)]
    return {
        "step_s": statistics.fmean(line["time/step"] - line.get("time/evaluation", 0.0) for line in steps),
        "before": lines[0]["val/score/mean"],
        "accuracy": lines[-1]["val/score/mean"],
        "tokens": statistics.fmean(line["tokens/generated"] for line in steps),
        "staleness": statistics.fmean(line.get("rollout/staleness/mean", 0.0) for line in steps),
    }


def summary(seeds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Over all seeds, by mode: means, and the mean over seeds of how much faster than the synchronous run."""
    found = {}
    for mode in seeds[0]:
        runs = [seed[mode] for seed in seeds]
        found[mode] = {name: statistics.fmean(each[name] for each in runs) for name in runs[0]}
        found[mode]["faster"] = statistics.fmean(seed[SYNC]["step_s"] / seed[mode]["step_s"] for seed in seeds)
        found[mode]["accuracy_std"] = statistics.stdev(r["accuracy"] for r in runs) if len(runs) > 1 else 0.0
    return found


def table(rates: dict[str, Any]) -> str:
    lines = [
        f"{PROMPTS} prompts × {ANSWERS} answers a step. Seconds of a step less evaluation, means over seeds; accuracy"
        " on held-out sequences after the last step with its standard deviation over seeds.",
        "",
        "| learning rate | seeds | steps | mode | seconds per step | faster than synchronous | tokens per step |"
        " staleness | accuracy before | after |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for rate, found in sorted(rates.items(), key=lambda item: float(item[0])):
        lines += [
            f"| {float(rate):g} | {len(found['seeds'])} | {found['steps']} | {mode} | {each['step_s']:.2f} |"
            f" {each['faster']:.2f} × | {each['tokens']:.0f} | {each['staleness']:.2f} | {each['before']:.3f} |"
            f" {each['accuracy']:.3f} ± {each['accuracy_std']:.3f} |"
            for mode, each in summary(found["seeds"]).items()
        ]
    return "\n".join(
        [
            *lines,
            "",
            "Load of the machine beforehand: "
            + ", ".join(f"{_load(found['load'])} ({float(rate):g})" for rate, found in rates.items())
            + ".",
        ]
    )


def _load(found: float | None) -> str:
    return "not recorded, other jobs ran beside it" if found is None else f"{found:.1f}"


def modes(folder: Path, seed: int, args: argparse.Namespace, rate: float) -> dict[str, dict[str, Any]]:
    """Configs by name."""
    found = {SYNC: grpo(folder, seed, args, rate, 0.0)}
    for ratio in args.ratios:
        found[f"asynchronous, ratio {ratio:g}"] = grpo(folder, seed, args, rate, ratio)
    for name, keys in OTHERWISE.items():
        config = grpo(folder, seed, args, rate, args.ratios[0]) | keys
        found[f"ratio {args.ratios[0]:g}, {name}"] = config | {"exp_name": f"{config['exp_name']}-{name}"}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[2e-4, 5e-4])
    args = parser.parse_args()
    path = RESULTS / "async_vs_sync.json"
    rates = json.loads(path.read_text(encoding="utf-8"))["rates"] if path.is_file() else {}
    load = os.getloadavg()[0]
    found: dict[float, list[dict[str, Any]]] = {rate: [] for rate in args.learning_rates}
    for seed in range(1, args.seeds + 1):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_rows(folder / "train.jsonl", 8192, seed)
            write_rows(folder / "val.jsonl", 512, seed + 1000)
            run(folder, sft(folder, seed, args.sft_steps))
            for rate, seeds in found.items():
                configs = modes(folder, seed, args, rate)
                seeds.append({mode: measured(run(folder, config)) for mode, config in configs.items()})
                print(rate, json.dumps(seeds[-1]), flush=True)
    for rate, seeds in found.items():
        rates[str(rate)] = {"steps": args.steps, "sft_steps": args.sft_steps, "load": load, "seeds": seeds}
    write_result("async_vs_sync", {"rates": rates}, table(rates))
    print(table(rates))


if __name__ == "__main__":
    main()
