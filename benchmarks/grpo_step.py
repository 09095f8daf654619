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

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_steps import against_trl, in_turns, main, run_config, slowest, stages

if TYPE_CHECKING:
    import argparse

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
    rows = [{"id": i, "prompt": f"{i % 100:02d}+{(7 * i) % 100:02d}=" * 2} for i in range(PROMPTS * steps)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    role = {"model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True}, "device_mapping": [0]}
    config: dict[str, Any] = {
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
    return generated(run_config(folder, config), config)


def generated(run: tuple[dict[str, Any], list[dict[str, float]]], config: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a run's steps, and what it generated."""
    seconds, lines = run
    return {
        **seconds,
        "mean_length": statistics.fmean(line["response_length/mean"] for line in lines),
        "samples": config["rollout_batch_size"] * config["num_return_sequences_in_group"] * len(lines),
    }


def training_half(vocab_size: int, response_tokens: int) -> dict[str, float]:
    """CPU seconds of forward, backward and optimizer step on a step's sequences, and of their matrix products alone."""
    import numpy as np
    from sft_step import attention_flops, gemms_of_a_step, make_strategy, timed

    from roll_core.algorithms.losses import sft_objective
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
        strategy.forward_backward(micros, sft_objective())
        strategy.optimizer_step()

    step()
    gemms()
    pairs = [(timed(step)["cpu_s"], timed(gemms)["cpu_s"]) for _ in range(TIMES)]
    strategy.close()
    step_s, gemms_s = (min(each) for each in zip(*pairs, strict=True))
    share = gemms_s / step_s * (1 + attention_flops(sequences, micros, vocab_size))
    return {"tokens": PROMPTS * SAMPLES * length, "cpu_s": step_s, "gemms_cpu_s": gemms_s, "share": share}


def measure(vocab_size: int, arguments: argparse.Namespace, trl: Path | None) -> dict[str, Any]:
    """Both take turns, and the training half alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, vocab_size)
        numbers = [str(n) for n in (arguments.steps, PROMPTS, SAMPLES, NEW_TOKENS)]
        summary, ratios, found = in_turns(
            None if trl is None else [str(trl), "peers/trl_grpo.py", str(folder), *numbers],
            [sys.executable, "grpo_step.py", "--ours", str(folder), "--steps", numbers[0]],
            steps=arguments.steps,
            rounds=arguments.rounds,
        )
    for who, each in summary.items():
        each["mean_length"] = found[who][0]["mean_length"]
    return {
        "summary": summary,
        "ratios": ratios,
        "training_half": training_half(vocab_size, round(summary["roll"]["mean_length"])),
        "stages": found["roll"][-1]["stages"],
        "rounds": found,
    }


def rows_of(shapes: dict[str, dict[str, Any]]) -> list[str]:
    """One row a vocabulary and contestant."""
    return ["| vocabulary | | CPU s | wall s | tokens per response |", "|--:|---|--:|--:|--:|"] + [
        f"| {int(vocab_size):,} | {who} | {s['cpu_s']:.2f} | {s['wall_s']:.2f} | {s['mean_length']:.1f} |"
        for vocab_size, shape in shapes.items()
        for who, s in shape["summary"].items()
    ]


def table(shapes: dict[str, dict[str, Any]]) -> str:
    """One row a vocabulary and contestant, then what each vocabulary shows."""
    lines = [*rows_of(shapes), ""]
    for vocab_size, shape in shapes.items():
        half = shape["training_half"]
        lines += [
            f"* Vocabulary {int(vocab_size):,}:{against_trl(shape['ratios'])} The training half alone"
            f" ({half['tokens']:,} tokens) takes"
            f" {half['cpu_s']:.2f} CPU s, {half['share']:.0%} of the GEMM rate: its matrix products without those of"
            f" attention take {half['gemms_cpu_s']:.2f} s.",
            f"  A step by the clock: {stages(shape['stages'])}.",
        ]
    return "\n".join(lines + slowest([r for shape in shapes.values() for r in shape["ratios"].values()], 4))


if __name__ == "__main__":
    main(
        "grpo_step",
        __doc__,
        shapes=VOCABULARIES,
        option="--vocabulary",
        measure=measure,
        ours=ours,
        table=table,
        steps=5,
    )
