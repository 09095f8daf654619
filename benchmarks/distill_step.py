"""One step of on-policy distillation beside TRL's DistillationTrainer on the same models and the same work.

    ./run bench distill_step [--steps N] [--rounds N] [--vocabulary N ...] [--without-peer]

A student of 256 × 6 and a teacher of 512 × 6, both Qwen3-style with random weights; 128 prompts × at most 32 new
tokens, one optimizer step on the reverse KL over the whole vocabulary, fp32. Both load the same directories. Ours is
`roll-core run` with the pipeline distill (`kd_support: full`), weight sync with its proof included. Aim: at least twice
as fast as TRL.

Vocabularies as in grpo_step. Those that are not named keep the results that they had.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_step import LEARNING_RATE, MODEL, NEW_TOKENS, VOCABULARIES, alphabet, generated, rows_of
from trl_steps import against_trl, in_turns, main, run_config, slowest, stages

if TYPE_CHECKING:
    import argparse

PROMPTS = 128
TEACHER = MODEL | {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}


def make_models(folder: Path, vocab_size: int) -> None:
    """The directories `student` and `teacher` that both contestants load."""
    from roll_core.data.tokenizers import make_tokenizer
    from roll_core.spec.config import TokenizerConfig
    from roll_core.spec.model import ModelSpec
    from roll_modeling.model import load_model

    for seed, (name, model) in enumerate((("student", MODEL), ("teacher", TEACHER))):
        here = folder / name
        tokenizer = make_tokenizer(TokenizerConfig(kind="char", alphabet=alphabet(vocab_size)), [], here)
        load_model(ModelSpec(random_init=model, tokenizer=str(here), seed=seed)).save_pretrained(here)
        tokenizer.save_pretrained(here)


def ours(folder: Path, steps: int) -> dict[str, Any]:
    """Run in this process; seconds of each step."""
    rows = [{"id": i, "prompt": f"{i % 100:02d}+{(7 * i) % 100:02d}=" * 2} for i in range(PROMPTS * steps)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    model = {"dtype": "fp32", "disable_gradient_checkpointing": True}
    role = {"model_args": model, "device_mapping": [0]}
    teacher = model | {"model_name_or_path": str(folder / "teacher")}
    scores = {"strategy_args": {"strategy_name": "hf_infer"}}
    config = {
        "pipeline": "distill",
        "output_dir": str(folder / "output"),
        "pretrain": str(folder / "student"),
        "prompt_length": 32,
        "response_length": NEW_TOKENS,
        "max_steps": steps,
        "eval_steps": 0,
        "save_steps": 0,
        "track_with": [],
        "export_model": False,
        "rollout_batch_size": PROMPTS,
        "num_return_sequences_in_group": 1,
        "kd_support": "full",
        "actor_train": role
        | {
            "strategy_args": {"strategy_name": "hf_train"},
            "data_args": {"file_name": str(folder / "rows.jsonl")},
            "training_args": {"learning_rate": LEARNING_RATE, "per_device_train_batch_size": PROMPTS},
        },
        "actor_infer": role | scores,
        "teachers": {"main": role | scores | {"model_args": teacher, "infer_batch_size": PROMPTS}},
    }
    return generated(run_config(folder, config), config)


def measure(vocab_size: int, arguments: argparse.Namespace, trl: Path | None) -> dict[str, Any]:
    """Both take turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder, vocab_size)
        models = [str(folder / "student"), str(folder / "teacher")]
        numbers = [str(n) for n in (arguments.steps, PROMPTS, NEW_TOKENS)]
        summary, ratios, found = in_turns(
            None if trl is None else [str(trl), "peers/trl_distill.py", *models, *numbers],
            [sys.executable, "distill_step.py", "--ours", str(folder), "--steps", numbers[0]],
            steps=arguments.steps,
            rounds=arguments.rounds,
        )
    for who, each in summary.items():
        each["mean_length"] = found[who][0]["mean_length"]
    return {"summary": summary, "ratios": ratios, "stages": found["roll"][-1]["stages"], "rounds": found}


def table(shapes: dict[str, dict[str, Any]]) -> str:
    """One row a vocabulary and contestant, then what each vocabulary shows."""
    lines = [*rows_of(shapes), ""]
    for vocab_size, shape in shapes.items():
        lines += [
            f"* Vocabulary {int(vocab_size):,}:{against_trl(shape['ratios'])}",
            f"  A step by the clock: {stages(shape['stages'])}.",
        ]
    return "\n".join(lines + slowest([shape["ratios"]["cpu_s"] for shape in shapes.values() if shape["ratios"]], 2))


if __name__ == "__main__":
    main(
        "distill_step",
        __doc__,
        shapes=VOCABULARIES,
        option="--vocabulary",
        measure=measure,
        ours=ours,
        table=table,
    )
