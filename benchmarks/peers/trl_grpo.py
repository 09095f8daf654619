"""TRL's GRPOTrainer on the work of benchmarks/grpo_step.py; runs in TRL's own environment and prints one JSON line.

python trl_grpo.py MODEL_DIRECTORY STEPS PROMPTS SAMPLES NEW_TOKENS
"""

from __future__ import annotations

import json
import sys
import tempfile

import torch
from datasets import Dataset
from steps import SETTINGS, Clock, sums
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    """Train, and print what a step took."""
    model_directory, steps, prompts, samples, new_tokens = sys.argv[1], *map(int, sys.argv[2:6])
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    rows = Dataset.from_list(sums(prompts * steps))
    lengths: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **columns: object) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=prompts * samples,
            num_generations=samples,
            max_completion_length=new_tokens,
            max_steps=steps,
            learning_rate=1e-7,
            beta=0.0,
            temperature=1.0,
            **SETTINGS,
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
    counts = {"mean_length": sum(lengths) / len(lengths), "samples": len(lengths)}
    print(json.dumps({**clock.seconds(), **counts}))


if __name__ == "__main__":
    main()
