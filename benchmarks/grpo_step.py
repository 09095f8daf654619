"""One GRPO step, rollouts included, beside TRL's GRPOTrainer on the same model and the same work.

    ./run bench grpo_step [--steps N] [--rounds N]

A Qwen3-style model of 256 × 6 with random weights, 16 prompts × 8 samples × at most 32 new tokens, one optimizer step
of 128 sequences, fp32. Both load the same directory. Ours is `roll-core run` with the rlvr pipeline, judges in
processes of their own and weight sync with its proof included. Aim: at least 4 times faster than TRL.
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

from common import peer_python, write_result

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


def some_reward(prompt: str, response: str, **row: object) -> float:
    """Differs between answers, costs nothing."""
    return sum(map(ord, response)) % 7 / 7


def make_model(folder: Path) -> None:
    """The directory that both contestants load."""
    from roll_core.data.tokenizers import make_tokenizer
    from roll_core.modeling.model import load_model
    from roll_core.spec.config import TokenizerConfig
    from roll_core.spec.model import ModelSpec

    tokenizer = make_tokenizer(TokenizerConfig(kind="char", alphabet=ALPHABET), [], folder)
    load_model(ModelSpec(random_init=MODEL, tokenizer=str(folder), seed=0)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ours(folder: Path, steps: int) -> dict[str, Any]:
    """Run in this process; seconds of each step."""
    import yaml

    from roll_core.config import load
    from roll_core.plugins.registry import load_registry
    from roll_core.runtime.console import Console
    from roll_core.runtime.loop import execute

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


def products_cpu_s(tokens: int, sequences: int) -> float:
    """CPU seconds of nothing but the matrix products of the training half, the best of several times."""
    from types import SimpleNamespace

    from sft_step import gemms_of_a_step

    step = gemms_of_a_step([SimpleNamespace(num_tokens=tokens, num_sequences=sequences)], len(ALPHABET) + 2)
    found = []
    for _ in range(8):
        begin = time.process_time()
        step()
        found.append(time.process_time() - begin)
    return min(found)


def run_peer(command: list[str]) -> dict[str, Any]:
    """The JSON on the last line of what a contestant prints."""
    folder = Path(__file__).resolve().parent
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Take turns, then compare medians of all steps but each round's first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ours", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ours:
        print(json.dumps(ours(Path(arguments.ours), arguments.steps)))
        return
    trl = peer_python("trl", ["trl>=0.20", "torch==2.13.0", "transformers<6", "datasets"])
    version = subprocess.run(
        [str(trl), "-c", "import importlib.metadata as m; print(m.version('trl'))"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
    found: dict[str, list[dict[str, Any]]] = {"roll": [], "trl": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        numbers = [str(n) for n in (arguments.steps, PROMPTS, SAMPLES, NEW_TOKENS)]
        for _ in range(arguments.rounds):
            found["trl"].append(run_peer([str(trl), "peers/trl_grpo.py", str(folder), *numbers]))
            found["roll"].append(
                run_peer([sys.executable, "grpo_step.py", "--ours", str(folder), "--steps", str(arguments.steps)])
            )

    def median(who: str, what: str) -> float:
        return statistics.median(value for each in found[who] for value in each[what][-(arguments.steps - 1) :])

    summary = {
        who: {
            "cpu_s": median(who, "cpu_s"),
            "wall_s": median(who, "wall_s"),
            "mean_length": found[who][0]["mean_length"],
        }
        for who in found
    }
    ratios = {what: summary["trl"][what] / summary["roll"][what] for what in ("cpu_s", "wall_s")}
    rows = "\n".join(
        f"| {who} | {s['cpu_s']:.2f} | {s['wall_s']:.2f} | {s['mean_length']:.1f} |" for who, s in summary.items()
    )
    met = "met" if min(ratios.values()) >= 4 else "missed"
    tokens = round(PROMPTS * SAMPLES * (PROMPT_TOKENS + summary["roll"]["mean_length"]))
    products = products_cpu_s(tokens, PROMPTS * SAMPLES)
    stages = found["roll"][-1]["stages"]
    spent = ", ".join(f"{k.removeprefix('time/')} {v:.2f} s" for k, v in stages.items() if k != "time/step")
    table = "\n".join(
        [
            f"TRL {version}. Seconds of one step, medians.",
            "",
            "| | CPU s | wall s | tokens per answer |",
            "|---|---|---|---|",
            rows,
            "",
            f"ROLL is {ratios['cpu_s']:.1f} × faster by CPU time and {ratios['wall_s']:.1f} × by the clock;"
            f" the aim of 4 is {met}.",
            "",
            f"Where ROLL's step goes: {spent}.",
            "",
            f"The matrix products of the training half alone ({tokens} tokens forward and backward, nothing between"
            f" them) take {products:.2f} CPU s. A step 4 times as fast as TRL's would have"
            f" {summary['trl']['cpu_s'] / 4:.2f} CPU s for them, the rollouts and all else.",
        ]
    )
    print(table)
    result = {"trl": version, "summary": summary, "ratios": ratios, "products_cpu_s": products, "rounds": found}
    write_result("grpo_step", result, table)


if __name__ == "__main__":
    main()
