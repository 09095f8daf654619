"""TRL's GRPOTrainer on the work of benchmarks/grpo_step.py; runs in TRL's own environment and prints one JSON line.

python trl_grpo.py MODEL_DIRECTORY STEPS PROMPTS SAMPLES NEW_TOKENS
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """CPU and wall seconds at the beginning of each step and at the end."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self.marks.append((time.process_time(), time.perf_counter()))

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        self.marks.append((time.process_time(), time.perf_counter()))


def main() -> None:
    """Train, and print what a step took."""
    model_directory, steps, prompts, samples, new_tokens = sys.argv[1], *map(int, sys.argv[2:6])
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    rows = Dataset.from_list([{"prompt": f"{i % 100:02d}+{(7 * i) % 100:02d}=" * 2} for i in range(prompts * steps)])
    lengths: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **columns: object) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=prompts * samples,
            gradient_accumulation_steps=1,
            num_generations=samples,
            max_completion_length=new_tokens,
            max_steps=steps,
            learning_rate=1e-7,
            beta=0.0,
            temperature=1.0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    pairs = list(zip(clock.marks, clock.marks[1:], strict=False))
    print(
        json.dumps(
            {
                "cpu_s": [b[0] - a[0] for a, b in pairs],
                "wall_s": [b[1] - a[1] for a, b in pairs],
                "mean_length": sum(lengths) / len(lengths),
                "samples": len(lengths),
            }
        )
    )


if __name__ == "__main__":
    main()
